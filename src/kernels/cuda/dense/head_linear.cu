// Small linear layers, one per head (MLA's absorbed projections).
//
// Computes:  out[t, h] = scale * x[t, h] W_h^T, x f32 [T, heads, K], W bf16 [heads][N, K], out f32 or bf16.
// Shapes:    any; rows and heads of x and out are strided.
// Bytes:     2 heads N K, once per 64 tokens; plus T heads (4 K, once per 128 rows of W, + 4 N).
// Flops:     4 T heads N K on the tensor cores: x is split into two bf16.
// Bound:     HBM.
// Numerics:  x = high + low, both bf16: 16 significant bits of x are used (2^-17 relative); exact products,
//            f32 sums over K in order, high and low parts in the same sum. A token has the same bits for
//            every T in the same kernel; invariant_head_linear() uses one kernel for every T.
//
// The kernel for many tokens multiplies 64 tokens by 128 rows of W, then the next such tile. A block has one
// warpgroup that multiplies, with its tokens as wgmma's register operand, and a thread that fills a ring of
// stages with tensor copies, which goes on from tile to tile; the first weights do not wait for the kernels
// before this one. While the tensor cores work on 32 columns, the next 32 are split. With few tokens, smaller
// blocks on mma.sync begin and end sooner.
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/ring_place.cuh"
#include "kernels/cuda/ptx/tensor_map.h"
#include "kernels/cuda/ptx/token_fragments.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kTokens = 64, kRows = 128;             // of a tile; rows are W's
constexpr int kDepth = 64, kHalfDepth = kDepth / 2;  // columns per stage, and per tile of x
constexpr int kStages = 3, kBlocksPerSm = 2;
constexpr int kMultipliers = 128, kThreads = kMultipliers + 32;
constexpr int kRowBytes = static_cast<int>(kTensorTileBytes);
constexpr int kWeightBytes = kRows * kRowBytes, kHalfBytes = kTokens * kRowBytes;
static_assert(kRowBytes == kHalfDepth * sizeof(float) && kRowBytes == kDepth * sizeof(bf16));

struct KernelArgs {
  HeadLinearArgs linear;
  CUtensorMap x, weight;  // tiles of kTokens x kHalfDepth f32, and of kRows x kDepth bf16 of all heads' rows
  // The tiles are ordered by head, then by token, then by row of W.
  int num_row_tiles, num_token_tiles, num_tiles;
};

struct Shared {
  alignas(1024) uint8_t x[kStages][2][kHalfBytes];
  alignas(1024) uint8_t weight[kStages][kWeightBytes];
  uint64_t full[kStages], empty[kStages];
};

// A place in the columns of a block's tiles.
struct Place {
  int tile, k = 0;
  int token, row, head;  // the tile's first token and row of W

  __device__ __forceinline__ explicit Place(const KernelArgs& a) {
    set_tile(a, static_cast<int>(blockIdx.x));
  }
  __device__ __forceinline__ bool exists(const KernelArgs& a) const { return tile < a.num_tiles; }
  __device__ __forceinline__ void next_tile(const KernelArgs& a) {
    k = 0;
    set_tile(a, tile + static_cast<int>(gridDim.x));
  }
  __device__ __forceinline__ void next_columns(const KernelArgs& a) {
    if ((k += kDepth) >= a.linear.k) next_tile(a);
  }

 private:
  __device__ __forceinline__ void set_tile(const KernelArgs& a, int to) {
    tile = to;
    row = tile % a.num_row_tiles * kRows;
    const int tokens = tile / a.num_row_tiles;
    token = tokens % a.num_token_tiles * kTokens;
    head = tokens / a.num_token_tiles;
  }
};

// Fills the stages; runs on one thread.
__device__ __forceinline__ void load_stages(const KernelArgs& a, Shared& shared) {
  const auto load_weights = [&](const Place& at, int slot) {
    ptx::mbarrier_arrive_expect_tx(&shared.full[slot], kWeightBytes + 2 * kHalfBytes);
    ptx::tensor_load(shared.weight[slot], &a.weight, at.k, at.head * static_cast<int>(a.linear.n) + at.row,
                     &shared.full[slot]);
  };
  int early = 0;
  for (Place at(a); early < kStages && at.exists(a); at.next_columns(a)) load_weights(at, early++);
  ptx::grid_dependency_wait();
  RingPlace<kStages> ring;
  int i = 0;
  for (Place at(a); at.exists(a); at.next_columns(a), ring.next(), ++i) {
    if (i >= early) {
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      load_weights(at, ring.slot);
    }
    for (int half = 0; half < 2; ++half) {
      const int k = at.k + half * kHalfDepth, outside = -kHalfDepth;  // where there are zeros
      ptx::tensor_load(shared.x[ring.slot][half], &a.x,
                       k < a.linear.k ? at.head * static_cast<int>(a.linear.x_head_stride) + k : outside,
                       at.token, &shared.full[ring.slot]);
    }
  }
}

// Half a stage's columns of a warp's tokens, as fragments: in steps of 16 columns, the values rounded to
// bf16, then the remainders of that rounding.
struct SplitX {
  uint32_t parts[4][4];

  __device__ __forceinline__ void load(const TokenFragments& tokens, const uint8_t* tile) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 v = tokens.pair(tile, i / 4, i % 4);
      const ptx::SplitPair pair = ptx::split_pair(v.x, v.y);
      parts[i / 4 * 2][i % 4] = pair.high, parts[i / 4 * 2 + 1][i % 4] = pair.low;
    }
  }
  // Starts to add the products with the rows of W at descriptor `weight`.
  __device__ __forceinline__ void multiply(float (&sums)[kRows / 2], uint64_t weight) {
#pragma unroll
    for (int i = 0; i < 4; ++i) keep_registers(parts[i]);  // otherwise, wgmma would be serialised
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<kRows>::add(sums, parts[i], wgmma_b_advance(weight, i / 2 * 32));
    wgmma_commit();
  }
};

// Stores two results, of rows n and n + 1 of W, or one if the second does not exist.
__device__ __forceinline__ void store_pair(const HeadLinearArgs& a, int64_t t, int64_t head, int n, float x,
                                           float y) {
  if (t >= a.num_tokens || n >= a.n) return;
  const int64_t at = t * a.out_stride + head * a.out_head_stride + n;
  const bool has_second = n + 1 < a.n;
  x *= a.scale, y *= a.scale;
  if (a.out_dtype == DType::kF32) {
    auto* const out = static_cast<float*>(a.out) + at;
    if (has_second && reinterpret_cast<uintptr_t>(out) % 8 == 0) {
      *reinterpret_cast<float2*>(out) = {x, y};
    } else {
      out[0] = x;
      if (has_second) out[1] = y;
    }
  } else {
    auto* const out = static_cast<uint16_t*>(a.out) + at;
    const uint32_t pair = ptx::bf16_pair(x, y);
    if (has_second && reinterpret_cast<uintptr_t>(out) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(out) = pair;
    } else {
      out[0] = static_cast<uint16_t>(pair);
      if (has_second) out[1] = static_cast<uint16_t>(pair >> 16);
    }
  }
}

__device__ __forceinline__ void multiply_tiles(const KernelArgs& a, Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int own_token = warp * 16 + TokenFragments::token_of_row(lane / 4);
  const TokenFragments tokens(warp);
  const auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
  };
  SplitX x[2];
  RingPlace<kStages> ring;
  for (Place at(a); at.exists(a); at.next_tile(a)) {
    float sums[kRows / 2] = {};
    int before = -1;  // the slot whose weights may still be read
#pragma unroll 1
    for (int k = 0; k < a.linear.k; k += kDepth, ring.next()) {
      const int slot = __shfl_sync(~0u, ring.slot, 0);  // lets the compiler know that slot is warp-uniform
      ptx::mbarrier_wait(&shared.full[slot], ring.parity);
      const uint64_t weight = wgmma_b_descriptor(ptx::shared_address(shared.weight[slot]));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[half].load(tokens, shared.x[slot][half]);
        x[half].multiply(sums, wgmma_b_advance(weight, half * kHalfDepth * sizeof(bf16)));
        wgmma_wait<1>();
        if (half == 0 && before >= 0) release(before);
      }
      before = slot;
    }
    wgmma_wait<0>();
    keep_registers(sums);
    release(before);
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i)
      store_pair(a.linear, at.token + own_token + i % 2 * 8, at.head, at.row + i / 2 * 8 + lane % 4 * 2,
                 sums[2 * i], sums[2 * i + 1]);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    head_linear_kernel(const __grid_constant__ KernelArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  ptx::grid_dependents_launch();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kMultipliers / 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kMultipliers) {
    ptx::grid_dependency_wait();
    multiply_tiles(a, shared);
  } else if (threadIdx.x == kMultipliers) {
    load_stages(a, shared);
  }
}

// Whether rows can be read in pieces of 16 bytes.
bool is_aligned(const HeadLinearArgs& a) {
  return a.k % 8 == 0 && a.x_stride % 4 == 0 && a.x_head_stride % 4 == 0 && is_aligned_to_16(a.x) &&
         is_aligned_to_16(a.weight);
}

namespace few {

constexpr int kTokens = 16, kRowTiles = 2, kThreads = 128;
constexpr int kRows = kThreads / 32 * kRowTiles * 8;  // of W, in a block
constexpr int kStep = 32;                             // columns that a warp multiplies at once
constexpr int kCols = 512;                            // columns of x that are in shared memory at once
constexpr int kHeld = 4;                              // steps whose weights a warp holds

// Some columns of the tokens: the values rounded to bf16, and the remainders of that rounding.
struct Columns {
  static constexpr int kStride = kCols / 4 + 8;  // consecutive rows' words are 16 banks apart
  uint2 high[kTokens][kStride], low[kTokens][kStride];

  // Splits 4 num_quads columns of kTokens tokens, starting at x. Tokens from num_tokens on and columns from
  // num_cols on become zeros.
  template <bool kAligned>
  __device__ __forceinline__ void fill(const float* x, int64_t stride, int num_tokens, int num_cols,
                                       int num_quads) {
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * num_quads; i += kThreads) {
      const int token = i / num_quads, quad = i % num_quads, left = num_cols - quad * 4;
      float4 v{};
      if (token < num_tokens && left > 0) v = load<kAligned>(x + token * stride + quad * 4, left);
      const ptx::SplitPair front = ptx::split_pair(v.x, v.y), back = ptx::split_pair(v.z, v.w);
      high[token][quad] = {front.high, back.high};
      low[token][quad] = {front.low, back.low};
    }
  }

 private:
  template <bool kAligned>
  static __device__ __forceinline__ float4 load(const float* x, int left) {
    if constexpr (kAligned) return __ldcg(reinterpret_cast<const float4*>(x));
    return {__ldcg(x), left > 1 ? __ldcg(x + 1) : 0, left > 2 ? __ldcg(x + 2) : 0,
            left > 3 ? __ldcg(x + 3) : 0};
  }
};

// Returns 8 elements of a row. Those from `left` on are past its end and become zeros.
template <bool kAligned>
__device__ __forceinline__ uint4 load_weights(const bf16* from, int left) {
  if constexpr (kAligned) {
    return left > 0 ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
  } else {
    const auto element = [&](int i) { return i < left ? uint32_t{from[i].bits} : 0; };
    const auto pair = [&](int i) { return element(i) | element(i + 1) << 16; };
    return {pair(0), pair(2), pair(4), pair(6)};
  }
}

// Adds the products of the tokens' columns, starting at 4 quad, with a warp's rows of W. A fragment's columns
// can be in any order that is the same for both operands: lane part p of four has columns 8 p ... 8 p + 7.
__device__ __forceinline__ void multiply(float (&sums)[kRowTiles][4], const Columns& x, int quad,
                                         const uint4 (&w)[kRowTiles]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4, at = quad + lane % 4 * 2;
#pragma unroll
  for (const auto* part : {&x.high, &x.low}) {
    const uint4 upper = *reinterpret_cast<const uint4*>(&(*part)[row][at]),
                lower = *reinterpret_cast<const uint4*>(&(*part)[row + 8][at]);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      ptx::mma_bf16(sums[i], {upper.x, lower.x, upper.y, lower.y}, w[i].x, w[i].y);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      ptx::mma_bf16(sums[i], {upper.z, lower.z, upper.w, lower.w}, w[i].z, w[i].w);
  }
}

// The grid is (rows of W, heads, tokens).
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) few_head_linear_kernel(const __grid_constant__ HeadLinearArgs a) {
  __shared__ __align__(16) Columns x;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int n = static_cast<int>(a.n), cols = static_cast<int>(a.k), part = lane % 4;
  const int block_row = static_cast<int>(blockIdx.x) * kRows, first_row = block_row + warp * kRowTiles * 8;
  const int64_t head = blockIdx.y, token = blockIdx.z * int64_t{kTokens};
  const bf16* const matrix = a.weight + head * n * cols;
  ptx::grid_dependents_launch();
  if (kAligned && blockIdx.z == 0 && threadIdx.x == 0)
    ptx::bulk_prefetch_l2(matrix + int64_t{block_row} * cols,
                          static_cast<uint32_t>(min(kRows, n - block_row)) * static_cast<uint32_t>(cols) * 2);
  ptx::grid_dependency_wait();
  uint4 w[kHeld][kRowTiles];
  const auto load_step = [&](int slot, int k) {
    k += part * 8;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)  // rows past the end read the last row and are not stored
      w[slot][i] = load_weights<kAligned>(
          matrix + (int64_t{min(first_row + i * 8 + lane / 4, n - 1)} * cols + k), cols - k);
  };
#pragma unroll
  for (int s = 0; s < kHeld; ++s) load_step(s, s * kStep);
  float sums[kRowTiles][4] = {};
#pragma unroll 1
  for (int first = 0; first < cols; first += kCols) {
    const int steps = (min(kCols, cols - first) + kHeld * kStep - 1) / (kHeld * kStep) * kHeld;
    if (first > 0) __syncthreads();  // the columns before have been read
    x.template fill<kAligned>(a.x + token * a.x_stride + head * a.x_head_stride + first, a.x_stride,
                              static_cast<int>(min(a.num_tokens - token, int64_t{kTokens})), cols - first,
                              steps * kStep / 4);
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < steps; step += kHeld)
#pragma unroll
      for (int s = 0; s < kHeld; ++s) {
        multiply(sums, x, (step + s) * kStep / 4, w[s]);
        load_step(s, first + (step + s + kHeld) * kStep);
      }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i)
    store_pair(a, token + lane / 4 + i % 2 * 8, head, first_row + i / 2 * 8 + part * 2,
               sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
}

void launch_kernel(const HeadLinearArgs& a) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.n, int64_t{kRows})), static_cast<unsigned>(a.num_heads),
                  static_cast<unsigned>(ceil_div(a.num_tokens, int64_t{kTokens})));
  launch("head_linear", is_aligned(a) ? few_head_linear_kernel<true> : few_head_linear_kernel<false>,
         {grid, dim3(kThreads)}, a);
}

}  // namespace few

// Tensor copies read kHalfDepth columns of x at a time, which must not include those of another head.
bool fits_tensor_copies(const HeadLinearArgs& a) { return is_aligned(a) && a.k % kHalfDepth == 0; }

void launch_kernel(const HeadLinearArgs& a) {
  KernelArgs args{.linear = a};
  const int64_t x_cols = (a.num_heads - 1) * a.x_head_stride + a.k;
  args.x = tensor_map(a.x, sizeof(float), a.num_tokens, x_cols, kTokens, a.x_stride);
  args.weight = tensor_map(a.weight, sizeof(bf16), a.num_heads * a.n, a.k, kRows);
  args.num_row_tiles = static_cast<int>(ceil_div(a.n, int64_t{kRows}));
  args.num_token_tiles = static_cast<int>(ceil_div(a.num_tokens, int64_t{kTokens}));
  args.num_tiles = args.num_row_tiles * args.num_token_tiles * a.num_heads;
  prepare_kernel(head_linear_kernel, {.shared_bytes = sizeof(Shared)});
  const auto blocks = static_cast<unsigned>(std::min(args.num_tiles, kBlocksPerSm * device_limits().num_sms));
  launch("head_linear", head_linear_kernel, {dim3(blocks), dim3(kThreads), sizeof(Shared)}, args);
}

}  // namespace

void head_linear(const HeadLinearArgs& args, ThreadPool& pool) {
  if (args.num_tokens == 0 || args.num_tokens > few::kTokens) return invariant_head_linear(args, pool);
  few::launch_kernel(args);
}

void invariant_head_linear(const HeadLinearArgs& args, ThreadPool&) {
  if (args.num_tokens == 0) return;
  fits_tensor_copies(args) ? launch_kernel(args) : few::launch_kernel(args);
}

}  // namespace fp4moe::cuda
