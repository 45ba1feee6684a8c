// Packs FP4 matrices from a checkpoint's layout into tiles.
//
// Computes  the tiles of tile_layout.h, bit-identical to tests/kernels/cuda/layout/host_tiles.h: MXFP4 first
//           finds the range of the nonzero groups' scales, then moves the scales; NVFP4 widens e4m3 to e5m3
// Shapes    jobs of any size, one per y index of the grid; a thread makes 16 bytes of codes and at most 2 of
//           scales
// Bytes     reads and writes each weight once (MXFP4: reads it twice)
// Flops     none
// Bound     memory; takes an order of magnitude less time than the PCIe copy that feeds it
// Numerics  integers only
#include <cuda_runtime.h>

#include <algorithm>

#include "device/stream.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/cuda/layout/tile_pack.h"

namespace fp4moe {
namespace {

constexpr int kThreads = 128;  // one block per tile
constexpr int kRangeBlocks = 64;

__global__ void find_scale_ranges(TilePackJob* jobs) {
  TilePackJob& job = jobs[blockIdx.y];
  if (blockIdx.z == 1 && !job.is_pair) return;
  TilePackSide& side = job.side[blockIdx.z];
  const auto* groups = reinterpret_cast<const uint4*>(side.codes);
  const int64_t num_groups = static_cast<int64_t>(job.rows) * (job.cols / 32);
  int least = 255, most = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < num_groups;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 codes = groups[i];
    if (((codes.x | codes.y | codes.z | codes.w) & 0x77777777u) == 0) continue;
    least = min(least, static_cast<int>(side.scales[i]));
    most = max(most, static_cast<int>(side.scales[i]));
  }
  least = __reduce_min_sync(~0u, least);
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0 && least <= most) {
    atomicMin(&side.least, least);
    atomicMax(&side.most, most);
  }
}

// Moves two codes (a byte of the checkpoint) to their places in a register.
__device__ uint32_t in_register(uint32_t pair) {
  return (pair & 7) << 6 | (pair & 8) << 12 | (pair & 0x70) << 18 | (pair & 0x80) << 24;
}

__device__ uint32_t e5m3(uint32_t e4m3) {
  const int e = static_cast<int>(e4m3 >> 3);
  if (e > 0) return (e4m3 + (9 << 3)) & 0xff;
  const int shift = __clz(e4m3 & 7) - 28;  // moves the leading one of a subnormal to bit 3
  return static_cast<uint32_t>(10 - shift) << 3 | ((e4m3 << shift) & 7);
}

// Reads one row of a side: codes, and the scales that apply to them.
template <Fp4Format kFormat>
struct RowReader {
  static constexpr int kBlock = fp4_block(kFormat);
  const TilePackSide& side;
  int64_t row;
  int cols, move;
  bool exists;

  __device__ uint32_t scale(int group) const {
    return exists && group * kBlock < cols ? side.scales[row * (cols / kBlock) + group] : 0;
  }
  __device__ bool is_zero(uint32_t scale_byte) const {
    if (kFormat == Fp4Format::kNvfp4) return scale_byte == 0;
    return static_cast<int>(scale_byte) + move < kSmallestTileScale;
  }
  // Returns the codes of columns 2 i and 2 i + 1.
  __device__ uint32_t pair(int i) const {
    if (!exists || 2 * i >= cols) return 0;
    const uint32_t codes = side.codes[row * (cols / 2) + i];
    return is_zero(scale(2 * i / kBlock)) ? codes & 0x88u : codes;
  }
  __device__ uint32_t tile_scale(int group) const {
    if (!exists || group * kBlock >= cols) return 0;
    const uint32_t byte = scale(group);
    const bool zero = is_zero(byte);
    if (kFormat == Fp4Format::kNvfp4) return zero ? 0 : e5m3(byte);
    return zero ? kSmallestTileScale : byte + move;
  }
};

// Returns the offset that makes a side's largest scale equal to kLargestTileScale.
template <Fp4Format kFormat>
__device__ int scale_move(const TilePackSide& side) {
  return kFormat == Fp4Format::kMxfp4 && side.most > 0 ? kLargestTileScale - side.most : 0;
}

template <Fp4Format kFormat>
__device__ void finish_side(const TilePackSide& side, int32_t* worst_span) {
  float factor = 256.0f;
  if (kFormat == Fp4Format::kMxfp4) {
    factor = scalbnf(1.0f, 126 - scale_move<kFormat>(side));
    atomicMax(worst_span, side.most - side.least);
  }
  *side.scale = factor * side.tensor_scale;
}

template <Fp4Format kFormat>
__global__ void __launch_bounds__(kThreads) pack_jobs(const TilePackJob* jobs, int32_t* worst_span) {
  const TilePackJob& job = jobs[blockIdx.y];
  const int tiles_k = (job.cols + 63) / 64;
  const int num_sides = job.is_pair ? 2 : 1;
  const int64_t row_tiles = num_tiles(int64_t{job.rows} * num_sides);
  if (blockIdx.x >= row_tiles * tiles_k) return;
  const int tile_row = static_cast<int>(blockIdx.x) / tiles_k,
            tile_col = static_cast<int>(blockIdx.x) % tiles_k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const TilePackSide& low = job.side[0];
  const TilePackSide& high = job.side[num_sides - 1];
  const int64_t row =
      job.is_pair ? int64_t{tile_row} * 32 + warp * 8 + g : int64_t{tile_row} * 64 + warp * 16 + g;
  const int64_t high_row = job.is_pair ? row : row + 8;
  const RowReader<kFormat> a{low, row, job.cols, scale_move<kFormat>(low), row < job.rows};
  const RowReader<kFormat> b{high, high_row, job.cols, scale_move<kFormat>(high), high_row < job.rows};

  uint32_t words[4];
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    TileCodePairs pairs;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int i = tile_col * 32 + (2 * p + s) * 8 + q;
      pairs.step[s][0] = in_register(a.pair(i)), pairs.step[s][1] = in_register(b.pair(i));
      pairs.step[s][2] = in_register(a.pair(i + 4)), pairs.step[s][3] = in_register(b.pair(i + 4));
    }
    words[2 * p] = pairs.word(0), words[2 * p + 1] = pairs.word(1);
  }
  uint8_t* tile = job.tiles + tile_index(row_tiles, tiles_k, tile_row, tile_col) * tile_bytes(kFormat);
  reinterpret_cast<uint4*>(tile)[threadIdx.x] = make_uint4(words[0], words[1], words[2], words[3]);
  constexpr int kGroups = 64 / fp4_block(kFormat);  // in a tile's columns
  if (q < kGroups) {
    const int group = tile_col * kGroups + q;
    auto* scales = reinterpret_cast<uint16_t*>(tile + kTileCodeBytes + (warp * 8 + g) * kGroups * 2);
    scales[q] = static_cast<uint16_t>(a.tile_scale(group) | b.tile_scale(group) << 8);
  }
  if (blockIdx.x == 0 && threadIdx.x < num_sides) finish_side<kFormat>(job.side[threadIdx.x], worst_span);
}

}  // namespace

void launch_tile_pack(const TilePackArgs& args) {
  if (args.num_jobs == 0) return;
  Stream& stream = current_stream();
  const auto jobs = static_cast<unsigned>(args.num_jobs);
  const dim3 grid(static_cast<unsigned>(num_tiles(args.max_rows) * num_tiles(args.max_cols)), jobs);
  if (args.format == Fp4Format::kNvfp4) {
    pack_jobs<Fp4Format::kNvfp4><<<grid, kThreads, 0, stream.handle()>>>(args.jobs, args.worst_span);
    return stream.check_launch("tile_pack");
  }
  find_scale_ranges<<<dim3(kRangeBlocks, jobs, 2), 256, 0, stream.handle()>>>(args.jobs);
  stream.check_launch("tile_scale_range");
  pack_jobs<Fp4Format::kMxfp4><<<grid, kThreads, 0, stream.handle()>>>(args.jobs, args.worst_span);
  stream.check_launch("tile_pack");
}

}  // namespace fp4moe
