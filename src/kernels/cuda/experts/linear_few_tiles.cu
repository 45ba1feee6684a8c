// Dense linear layers with an FP4 matrix in tiles, for few tokens, optionally with the RMS norm of the input
// inside: an LM head in FP4.
//
// Computes:  out [T, N] f32 = scale * (x [T, K] W^T) + bias; W [N, K] FP4 in tiles (tile_layout.h); x is
// bf16,
//            or norm(residual).
// Shapes:    T <= 16 (with the norm <= 4), K a multiple of 16, N of at least two row tiles per SM; all of x
// in
//            shared memory.
// Bytes:     N K (1/2 + 1/16), MXFP4: N K (1/2 + 1/32), once from HBM; plus T (2 K + 4 N).
// Flops:     2 T N K, on mma.sync with the weights as its 16 rows and the tokens as its 8 columns.
// Bound:     HBM; the conversion of the codes, about 290 instructions of a warp per tile of 64 x 64, takes 60
// %
//            of the issue slots at 4.5 TB/s. A block streams its share of the row tiles through a ring of
//            bulk copies, and starts before it waits for the kernel whose output it reads.
// Numerics:  codes times block scales are exact in bf16; f32 sums in ascending k, even and odd steps of 16
// k's
//            in two chains, then the sum of both. A token has the same bits for every T. With the norm
//            inside, x = bf16(residual * weight), and 1 / rms multiplies the sum. Then fma(scale, sum, bias).
//
// A share's row tiles are processed in segments: those of one group of tile_layout.h, which are contiguous at
// each k tile. A stage has kStageTiles tiles: as many k tiles of the segment as fit. Each warp has 16 rows of
// every second row tile, over all of K:
//
//   row tile of the segment   0       1       2       3       4  ...  7
//   rows 0 ... 63 by warp     0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7 0  ...  7
#include "kernels/cuda/experts/linear_few_tiles.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/dense/linear_few_norm.cuh"
#include "kernels/cuda/experts/fp4_dequant.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ring_place.cuh"

namespace fp4moe {
namespace few_tiles {
namespace {

using few_linear::kBlockThreads;
using few_linear::kMaxTokens;
using few_linear::kThreads;
using few_linear::kWarps;

constexpr int kStageTiles = static_cast<int>(kTileGroup);
constexpr int kTileWarps = 4, kWarpTiles = kStageTiles * kTileWarps / kWarps;  // row tiles of a warp
constexpr int kMaxStages = 8, kMinStages = 3;
constexpr int kNormTokens = 4;  // most tokens with the norm inside
constexpr int kTilesPerSm = 2;  // least row tiles per SM, so that all SMs have work
constexpr int kStepsPerTile = kTileCols / 16;

// Bytes from the start of a block's shared memory: stages, then x [T][x_pitch] bf16, the norm's sums of
// squares [kWarps][kMaxTokens] f32, barriers (full and empty, [kMaxStages] each, and the barrier for x).
// x_pitch puts the words that a load reads from eight tokens into different banks.
struct Layout {
  int num_stages, stage_bytes, x, x_pitch, squares, barriers, end;
};

constexpr Layout layout_of(Fp4Format format, int num_tokens, int k, int num_stages) {
  Layout layout{};
  layout.num_stages = num_stages;
  layout.stage_bytes = kStageTiles * static_cast<int>(tile_bytes(format));
  layout.x = num_stages * layout.stage_bytes;
  layout.x_pitch = static_cast<int>(num_tiles(k) * kTileCols) * 2 + 16;
  layout.squares = layout.x + num_tokens * layout.x_pitch;
  layout.barriers = layout.squares + kWarps * kMaxTokens * 4;
  layout.end = layout.barriers + (2 * kMaxStages + 1) * 8;
  return layout;
}

struct Args : few_linear::FewTokens {
  const uint8_t* tiles;
  const float* scale;  // one value
  Layout layout;
};

// A part of a block's row tiles: those of one group.
struct Segment {
  int tile, count;   // row tiles [tile, tile + count)
  int group, depth;  // row tiles in the group; k tiles per stage
};

template <class F>
__device__ __forceinline__ void for_each_segment(const Args& a, const F& f) {
  const int row_tiles = static_cast<int>(num_tiles(a.n)), blocks = static_cast<int>(gridDim.x);
  const int block = static_cast<int>(blockIdx.x), rest = row_tiles % blocks;
  int tile = block * (row_tiles / blocks) + min(block, rest);
  const int end = tile + row_tiles / blocks + (block < rest ? 1 : 0);
  while (tile < end) {
    const int next = tile / kStageTiles * kStageTiles + kStageTiles, count = min(end, next) - tile;
    f(Segment{tile, count, static_cast<int>(tile_group_size(row_tiles, tile)), kStageTiles / count});
    tile += count;
  }
}

struct Barriers {
  uint64_t *full, *empty, *x;
  __device__ Barriers(const Args& a, uint8_t* shared)
      : full(reinterpret_cast<uint64_t*>(shared + a.layout.barriers)),
        empty(full + kMaxStages),
        x(empty + kMaxStages) {}
};

struct Ring {
  int num_stages, stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == num_stages) stage = 0, parity ^= 1;
  }
};

// Runs on one warp: lane i copies the i-th k tile of a stage.
template <Fp4Format kFormat>
__device__ void copy_tiles(const Args& a, uint8_t* shared, const Barriers& barriers) {
  constexpr int kBytes = static_cast<int>(tile_bytes(kFormat));
  const int lane = static_cast<int>(threadIdx.x) % 32, k_tiles = static_cast<int>(num_tiles(a.k));
  Ring ring{a.layout.num_stages};
  for_each_segment(a, [&](const Segment& s) {
    const int group_first = s.tile / kStageTiles * kStageTiles;
    const uint8_t* from =
        a.tiles + (static_cast<int64_t>(group_first) * k_tiles + s.tile - group_first) * kBytes;
    for (int k = 0; k < k_tiles; k += s.depth, ring.advance()) {
      const int depth = min(s.depth, k_tiles - k);
      ptx::mbarrier_wait(&barriers.empty[ring.stage], ring.parity ^ 1);
      if (lane == 0)
        ptx::mbarrier_arrive_expect_tx(&barriers.full[ring.stage],
                                       static_cast<uint32_t>(depth * s.count * kBytes));
      __syncwarp();
      if (lane < depth)
        ptx::bulk_load(shared + ring.stage * a.layout.stage_bytes + lane * s.count * kBytes,
                       from + static_cast<int64_t>(k + lane) * s.group * kBytes,
                       static_cast<uint32_t>(s.count * kBytes), &barriers.full[ring.stage]);
    }
  });
}

// A lane's words of x for a k tile: of token g or, in the second half of the tokens, g + 8.
struct TokenWords {
  uint32_t words[kStepsPerTile][2];
  __device__ __forceinline__ void load(const uint8_t* at) {
#pragma unroll
    for (int step = 0; step < kStepsPerTile; ++step)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        words[step][i] = *reinterpret_cast<const uint32_t*>(at + step * 32 + i * 16);
  }
};

// sums[half of the tokens][chain] += 16 rows of a tile times the tokens.
template <Fp4Format kFormat, int kHalves>
__device__ __forceinline__ void multiply_tile(const uint8_t* tile, int tile_warp, int lane,
                                              const TokenWords (&x)[kHalves], float (&sums)[kHalves][2][4]) {
  TileWords<kFormat> words;
  words.load(tile, tile_warp, lane);
#pragma unroll
  for (int step = 0; step < kStepsPerTile; ++step) {
    uint32_t weights[4];
    words.decode(step, weights);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      ptx::mma_bf16(sums[half][step % 2], weights, x[half].words[step][0], x[half].words[step][1]);
  }
}

// The factors of a lane's sums: the matrix's, and those of tokens 2 q and 2 q + 1 in each half.
template <int kHalves>
struct Factors {
  float scale, inverse_rms[kHalves][2];
};

// Writes a segment's outputs. Lane 4 g + q has rows g and g + 8 of tokens 2 q and 2 q + 1.
template <bool kNorm, int kHalves>
__device__ __forceinline__ void write_rows(const Args& a, int first_row, const Factors<kHalves>& factors,
                                           const float (&sums)[kHalves][2][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + g + i / 2 * 8;
    if (row >= a.n) continue;
    const float bias = a.bias == nullptr ? 0 : __ldg(a.bias + row);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int t = half * 8 + q * 2 + i % 2;
      if (t >= a.num_tokens) continue;
      float sum = sums[half][0][i] + sums[half][1][i];
      if (kNorm) sum *= factors.inverse_rms[half][i % 2];
      a.out[static_cast<int64_t>(t) * a.n + row] = fmaf(factors.scale, sum, bias);
    }
  }
}

template <Fp4Format kFormat, bool kNorm, int kHalves>
__device__ void multiply(const Args& a, const uint8_t* shared, const Barriers& barriers, float scale) {
  constexpr int kBytes = static_cast<int>(tile_bytes(kFormat)), kOtherTile = kWarps / kTileWarps;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = warp / kTileWarps, tile_warp = warp % kTileWarps;
  const int k_tiles = static_cast<int>(num_tiles(a.k));
  const uint8_t* x[kHalves];
  Factors<kHalves> factors{scale, {}};
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int last = a.num_tokens - 1;  // lanes past the last token read it; their columns are ignored
    x[half] = shared + a.layout.x + min(half * 8 + lane / 4, last) * a.layout.x_pitch + lane % 4 * 4;
    if (kNorm)
      for (int i = 0; i < 2; ++i)
        factors.inverse_rms[half][i] =
            few_linear::inverse_rms(a, shared, min(half * 8 + lane % 4 * 2 + i, last));
  }
  Ring ring{a.layout.num_stages};
  for_each_segment(a, [&](const Segment& s) {
    float sums[kWarpTiles][kHalves][2][4] = {};
    for (int k = 0; k < k_tiles; k += s.depth, ring.advance()) {
      ptx::mbarrier_wait(&barriers.full[ring.stage], ring.parity);
      const uint8_t* tile = shared + ring.stage * a.layout.stage_bytes;
      for (int end = min(k + s.depth, k_tiles), i = k; i < end; ++i, tile += s.count * kBytes) {
        TokenWords words[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) words[half].load(x[half] + i * kTileCols * 2);
        if (s.count == kStageTiles) {
#pragma unroll
          for (int j = 0; j < kWarpTiles; ++j)
            multiply_tile<kFormat>(tile + (first + j * kOtherTile) * kBytes, tile_warp, lane, words, sums[j]);
        } else {
#pragma unroll
          for (int j = 0; j < kWarpTiles; ++j)
            if (const int t = first + j * kOtherTile; t < s.count)
              multiply_tile<kFormat>(tile + t * kBytes, tile_warp, lane, words, sums[j]);
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&barriers.empty[ring.stage]);
    }
#pragma unroll
    for (int j = 0; j < kWarpTiles; ++j)
      if (const int t = first + j * kOtherTile; t < s.count)
        write_rows<kNorm>(a, (s.tile + t) * static_cast<int>(kTileRows) + tile_warp * 16, factors, sums[j]);
  });
}

// Clears x past column k, which the zero codes of the last k tile's padding are multiplied by.
__device__ void clear_padding(const Args& a, uint8_t* shared) {
  const int words = (static_cast<int>(num_tiles(a.k) * kTileCols) - a.k) / 2;
  for (int i = static_cast<int>(threadIdx.x); i < a.num_tokens * words; i += kThreads)
    *reinterpret_cast<uint32_t*>(shared + a.layout.x + i / words * a.layout.x_pitch + a.k * 2 +
                                 i % words * 4) = 0;
}

// Warps 0 to 7 load x and multiply; warp 8 copies tiles.
template <Fp4Format kFormat, bool kNorm, int kHalves>
__global__ void __launch_bounds__(kBlockThreads, kHalves == 1 ? 2 : 1)
    linear_few_tiles_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Barriers barriers(a, shared);
  const bool copies = threadIdx.x >= kThreads;
  ptx::grid_dependents_launch();
  if (!copies) {
    clear_padding(a, shared);
  } else if (threadIdx.x == kThreads) {
    for (int i = 0; i < a.layout.num_stages; ++i) {
      ptx::mbarrier_init(&barriers.full[i], 1);
      ptx::mbarrier_init(&barriers.empty[i], kWarps);
    }
    ptx::mbarrier_init(barriers.x, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (copies) return copy_tiles<kFormat>(a, shared, barriers);
  const float scale = __ldg(a.scale);
  if constexpr (kNorm) {
    const few_linear::NormWeights weights(a);
    ptx::grid_dependency_wait();
    few_linear::load_normed(a, weights, shared);
  } else {
    ptx::grid_dependency_wait();
    few_linear::load_x(a, shared, barriers.x);
  }
  multiply<kFormat, kNorm, kHalves>(a, shared, barriers, scale);
}

// Blocks per SM, and the stages of each block's ring.
struct Rings {
  int blocks_per_sm, num_stages;
};

// Two blocks per SM if their rings are deep enough: the conversion of codes needs many warps.
Rings rings_of(Fp4Format format, int num_tokens, int k) {
  constexpr int kSharedPerSm = 222 * 1024, kDeepRing = 4;
  const Layout layout = layout_of(format, num_tokens, k, 0);
  const auto stages = [&](int bytes) {
    return std::min((bytes - layout.end) / layout.stage_bytes, kMaxStages);
  };
  if (num_tokens <= 8 && stages(kSharedPerSm / 2) >= kDeepRing) return {2, stages(kSharedPerSm / 2)};
  return {1, stages(std::min(kSharedPerSm, device_limits().shared_bytes_per_block))};
}

template <Fp4Format kFormat>
void launch_tiles(Args a, bool norm) {
  const Rings rings = rings_of(kFormat, a.num_tokens, a.k);
  a.layout = layout_of(kFormat, a.num_tokens, a.k, rings.num_stages);
  const auto kernel = norm                ? linear_few_tiles_kernel<kFormat, true, 1>
                      : a.num_tokens <= 8 ? linear_few_tiles_kernel<kFormat, false, 1>
                                          : linear_few_tiles_kernel<kFormat, false, 2>;
  prepare_kernel(kernel,
                 {.shared_bytes = device_limits().shared_bytes_per_block, .shares_sm = a.num_tokens <= 8});
  const int64_t blocks =
      std::min<int64_t>(num_tiles(a.n), int64_t{device_limits().num_sms} * rings.blocks_per_sm);
  launch("linear_few_tiles", kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), static_cast<size_t>(a.layout.end)}, a);
}

}  // namespace
}  // namespace few_tiles

bool linear_few_tiles_fits(const TiledLinearArgs& args) {
  using namespace few_tiles;
  const int64_t n = args.matrix.hidden_size, k = args.matrix.intermediate_size;
  if (args.matrix.format == Fp4Format::kNone ||
      args.num_tokens > (args.norm == nullptr ? kMaxTokens : kNormTokens))
    return false;
  if (k <= 0 || k % 16 != 0 || k > (1 << 16) || num_tiles(n) < kTilesPerSm * device_limits().num_sms)
    return false;
  return rings_of(args.matrix.format, static_cast<int>(args.num_tokens), static_cast<int>(k)).num_stages >=
         kMinStages;
}

void linear_few_tiles(const TiledLinearArgs& args) {
  using namespace few_tiles;
  FP4MOE_CHECK(linear_few_tiles_fits(args), "linear_few_tiles with a size that does not fit");
  if (args.num_tokens == 0) return;
  Args a{{.bias = args.matrix.down_bias,
          .x = args.x,
          .residual = nullptr,
          .norm_weight = nullptr,
          .out = args.out,
          .eps = 0,
          .num_tokens = static_cast<int>(args.num_tokens),
          .n = static_cast<int>(args.matrix.hidden_size),
          .k = static_cast<int>(args.matrix.intermediate_size)},
         args.matrix.down,
         args.matrix.scales + 2,
         {}};
  if (args.norm != nullptr) {
    a.residual = args.norm->x;
    a.norm_weight = args.norm->weight;
    a.eps = args.norm->eps;
  }
  if (args.matrix.format == Fp4Format::kMxfp4)
    launch_tiles<Fp4Format::kMxfp4>(a, args.norm != nullptr);
  else
    launch_tiles<Fp4Format::kNvfp4>(a, args.norm != nullptr);
}

}  // namespace fp4moe
