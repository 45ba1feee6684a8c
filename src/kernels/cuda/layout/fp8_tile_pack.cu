// Packs FP4 matrices from a checkpoint's layout into w4a8's tiles.
//
// Computes  the tiles of fp8_tile_layout.h, bit-identical to tests/kernels/cuda/layout/host_tiles.h: for each
//           row the range of its scales and its factor, then the tiles
// Shapes    jobs of any size; a block makes all tiles of 64 rows, each in shared memory at Fp8Place's offsets
// Bytes     reads each weight twice (the second time from the L2) and writes it once
// Flops     none
// Bound     memory; takes an order of magnitude less time than the PCIe copy that feeds it
// Numerics  multiplications by powers of two; the moved scales are exact in e4m3
#include <cuda_runtime.h>

#include "device/stream.h"
#include "formats/e4m3.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/tile_pack.h"

namespace fp4moe {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = kFp8TileRows, kCols = kFp8TileCols;
constexpr int kMxIndices = kFp8MxTop - kFp8MxBottom + 1;

// The source of one row of the tiles in the checkpoint's layout, and the exponent offset for its scales.
struct SourceRow {
  const uint8_t *codes, *scales;
  bool exists;
  int move;  // MXFP4: added to the scale byte; NVFP4: added to the scale's exponent
};

// Returns the source of tile row `row`; gate and up rows are interleaved as in tile_row().
template <Fp4Format kFormat>
__device__ SourceRow source_row(const TilePackJob& job, int64_t row) {
  const int64_t within = row % 16;
  const int64_t from = job.is_pair ? row / 16 * 8 + within % 8 : row;
  const TilePackSide& side = job.side[job.is_pair ? within / 8 : 0];
  return {side.codes + from * (job.cols / 2), side.scales + from * (job.cols / fp4_block(kFormat)),
          from < job.rows, 0};
}

template <Fp4Format kFormat>
__device__ bool has_codes(const uint8_t* group) {
  const auto* words = reinterpret_cast<const uint2*>(group);
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < fp4_block(kFormat) / 16; ++i) any |= words[i].x | words[i].y;
  return (any & 0x77777777u) != 0;
}

// Sets the row's move, returns its factor and raises *worst_span to at least the row's span of e8m0 scales.
// Called by a whole warp.
template <Fp4Format kFormat>
__device__ float find_move(const TilePackJob& job, SourceRow& row, int32_t* worst_span) {
  constexpr int kBlock = fp4_block(kFormat);
  int least = 255, most = 0;
  for (int i = threadIdx.x % 32; row.exists && i < job.cols / kBlock; i += 32) {
    if (!has_codes<kFormat>(row.codes + i * (kBlock / 2))) continue;
    least = min(least, static_cast<int>(row.scales[i]));
    most = max(most, static_cast<int>(row.scales[i]));
  }
  least = __reduce_min_sync(~0u, least);
  most = __reduce_max_sync(~0u, most);
  if (!row.exists) return 0;
  if (kFormat == Fp4Format::kMxfp4) {
    if (most < least) return 1;  // only zeros
    if (threadIdx.x % 32 == 0) atomicMax(worst_span, most - least);
    row.move = kMxIndices - 1 - most;
    return scalbnf(1.0f, most - 127 - kFp8MxTop);
  }
  if (most == 0) return 1;
  const float scale = e4m3_decode(static_cast<uint8_t>(most));
  row.move = 8 - ilogbf(scale);
  if (scalbnf(scale, row.move) > kE4m3Max) --row.move;
  return scalbnf(8.0f, -row.move);
}

template <Fp4Format kFormat>
__device__ uint8_t scale_index(uint8_t scale, int move) {
  if (kFormat == Fp4Format::kMxfp4)
    return static_cast<uint8_t>(8 * min(max(scale + move, 0), kMxIndices - 1));
  return e4m3_encode(scalbnf(e4m3_decode(scale), move));
}

// Grid: (row tiles of the largest job, number of jobs).
template <Fp4Format kFormat>
__global__ void __launch_bounds__(kThreads) pack_fp8_jobs(const TilePackJob* jobs, int32_t* worst_span) {
  constexpr int kBlock = fp4_block(kFormat), kTileBytes = static_cast<int>(fp8_tile_bytes(kFormat));
  __shared__ SourceRow rows[kRows];
  __shared__ __align__(16) uint8_t tile[kTileBytes];
  const TilePackJob& job = jobs[blockIdx.y];
  const int num_sides = job.is_pair ? 2 : 1, thread = static_cast<int>(threadIdx.x);
  const int64_t n = int64_t{job.rows} * num_sides, first_row = blockIdx.x * int64_t{kRows};
  if (first_row >= n) return;
  auto* factors = reinterpret_cast<float*>(job.tiles + fp8_row_factors_offset(kFormat, n, job.cols));
  for (int r = thread / 32; r < kRows; r += kThreads / 32) {
    SourceRow row = source_row<kFormat>(job, first_row + r);
    const float factor = find_move<kFormat>(job, row, worst_span);
    if (thread % 32 != 0) continue;
    rows[r] = row;
    factors[first_row + r] = factor;
  }
  for (int slab = 0; slab < num_slabs(job.cols); ++slab) {
    for (int i = thread; i < kTileBytes / 16; i += kThreads) reinterpret_cast<uint4*>(tile)[i] = {};
    __syncthreads();
    for (int i = thread; i < kRows * kCols / 8; i += kThreads) {  // eight codes at a time
      const int r = i / (kCols / 8), c = i % (kCols / 8) * 8, column = slab * kCols + c;
      const SourceRow& row = rows[r];
      if (!row.exists || column >= job.cols) continue;
      const uint32_t codes = *reinterpret_cast<const uint32_t*>(row.codes + column / 2);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const Fp8Place at(r, c + j);
        const uint32_t code = codes >> (4 * j) & 15;
        atomicOr(reinterpret_cast<uint32_t*>(tile + at.word_offset()),
                 (code & 7) << at.magnitude_bit() | code >> 3 << at.sign_bit());
      }
      if (c % kBlock == 0)
        tile[Fp8Place(r, c).scale_offset(kFormat)] =
            scale_index<kFormat>(row.scales[column / kBlock], row.move);
    }
    __syncthreads();
    auto* to = reinterpret_cast<uint4*>(
        job.tiles + fp8_tile_offset(kFormat, fp8_row_tiles(n), num_slabs(job.cols), blockIdx.x, slab));
    for (int i = thread; i < kTileBytes / 16; i += kThreads) to[i] = reinterpret_cast<uint4*>(tile)[i];
    __syncthreads();
  }
  if (blockIdx.x == 0 && thread < num_sides) *job.side[thread].scale = job.side[thread].tensor_scale;
}

}  // namespace

void launch_fp8_tile_pack(const TilePackArgs& args) {
  if (args.num_jobs == 0) return;
  Stream& stream = current_stream();
  const dim3 grid(static_cast<unsigned>(fp8_row_tiles(args.max_rows)), static_cast<unsigned>(args.num_jobs));
  const auto kernel =
      args.format == Fp4Format::kNvfp4 ? pack_fp8_jobs<Fp4Format::kNvfp4> : pack_fp8_jobs<Fp4Format::kMxfp4>;
  kernel<<<grid, kThreads, 0, stream.handle()>>>(args.jobs, args.worst_span);
  stream.check_launch("fp8_tile_pack");
}

}  // namespace fp4moe
