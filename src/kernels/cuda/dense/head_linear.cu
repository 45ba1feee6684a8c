// Small linear layers, one per head (MLA's absorbed projections).
//
// Computes:  out[t, h] = scale * x[t, h] W_h^T, x f32 [T, heads, K], W bf16 [heads][N, K], out f32 or bf16.
// Shapes:    any; rows and heads of x and out are strided.
// Bytes:     2 heads N K, once per 64 tokens; plus T heads (4 K + 4 N).
// Flops:     4 T heads N K on mma.sync: x is split into two bf16.
// Bound:     HBM for few tokens; the tensor cores' synchronous rate for many.
// Numerics:  x = high + low, both bf16: 16 significant bits of x are used (2^-17 relative); exact products,
//            f32 sums over K in order, high and low parts in the same sum. A token has the same bits for
//            every T.
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kRowsPerWarp = 16;  // of W: two columns of mma tiles
constexpr int kBlockRows = kWarps * kRowsPerWarp;

// Loads 8 of a row's elements, beginning at k, with zeros past the end; uses vector loads if the rows are
// aligned.
template <bool kAligned>
__device__ __forceinline__ uint4 load_weights(const bf16* row, int64_t k, int64_t end) {
  if (kAligned && k + 8 <= end) return __ldg(reinterpret_cast<const uint4*>(row + k));
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = k + 2 * i < end ? row[k + 2 * i].bits : 0;
    const uint32_t high = k + 2 * i + 1 < end ? row[k + 2 * i + 1].bits : 0;
    pairs[i] = low | high << 16;
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// 8 of a token's elements as bf16 pairs: the rounded values, and the remainders of that rounding.
struct SplitX {
  uint32_t high[4] = {}, low[4] = {};
};

template <bool kAligned>
__device__ __forceinline__ SplitX load_x(const float* row, int64_t k, int64_t end) {
  float x[8];
  if (kAligned && k + 8 <= end) {
    const float4 a = __ldcg(reinterpret_cast<const float4*>(row + k)),
                 b = __ldcg(reinterpret_cast<const float4*>(row + k + 4));
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = k + i < end ? __ldcg(row + k + i) : 0;
  }
  SplitX split;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    split.high[i] = ptx::bf16_pair(x[2 * i], x[2 * i + 1]);
    split.low[i] = ptx::bf16_pair(x[2 * i] - ptx::low_of_pair(split.high[i]),
                                  x[2 * i + 1] - ptx::high_of_pair(split.high[i]));
  }
  return split;
}

__device__ __forceinline__ void multiply(float (&c)[4], const SplitX& a, const SplitX& b, const uint4& w) {
  ptx::mma_bf16(c, {a.high[0], b.high[0], a.high[1], b.high[1]}, w.x, w.y);
  ptx::mma_bf16(c, {a.high[2], b.high[2], a.high[3], b.high[3]}, w.z, w.w);
  ptx::mma_bf16(c, {a.low[0], b.low[0], a.low[1], b.low[1]}, w.x, w.y);
  ptx::mma_bf16(c, {a.low[2], b.low[2], a.low[3], b.low[3]}, w.z, w.w);
}

__device__ __forceinline__ void store(const HeadLinearArgs& a, int64_t t, int64_t head, int64_t n,
                                      float sum) {
  if (t >= a.num_tokens || n >= a.n) return;
  const int64_t at = t * a.out_stride + head * a.out_head_stride + n;
  if (a.out_dtype == DType::kF32)
    static_cast<float*>(a.out)[at] = sum * a.scale;
  else
    static_cast<bf16*>(a.out)[at].bits = __bfloat16_as_ushort(__float2bfloat16_rn(sum * a.scale));
}

// A block multiplies kBlockRows rows of W, for one head, by kTokenTiles times 16 tokens. The grid is (rows of
// W, heads, tokens).
template <int kTokenTiles, bool kAligned>
__global__ void __launch_bounds__(kWarps * 32) head_linear_kernel(const __grid_constant__ HeadLinearArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, part = lane % 4;
  const int64_t head = blockIdx.y, first_token = blockIdx.z * int64_t{kTokenTiles} * 16;
  const int64_t first_row = blockIdx.x * int64_t{kBlockRows} + warp * kRowsPerWarp;
  if (first_row >= a.n) return;
  // Rows past the end read the last row and are not stored.
  const bf16* matrix = a.weight + head * a.n * a.k;
  const bf16 *row_0 = matrix + min(first_row + g, a.n - 1) * a.k,
             *row_1 = matrix + min(first_row + 8 + g, a.n - 1) * a.k;
  const float* x = a.x + head * a.x_head_stride;
  const auto token = [&](int tile, int half) {
    return x + min(first_token + tile * 16 + half * 8 + g, a.num_tokens - 1) * a.x_stride;
  };
  float c[kTokenTiles][2][4] = {};
#pragma unroll 2
  for (int64_t k = part * 8; k < a.k + part * 8; k += 32) {
    const uint4 w_0 = load_weights<kAligned>(row_0, k, a.k), w_1 = load_weights<kAligned>(row_1, k, a.k);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const SplitX upper = load_x<kAligned>(token(tile, 0), k, a.k),
                   lower = load_x<kAligned>(token(tile, 1), k, a.k);
      multiply(c[tile][0], upper, lower, w_0);
      multiply(c[tile][1], upper, lower, w_1);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      store(a, first_token + tile * 16 + i % 4 / 2 * 8 + g, head, first_row + i / 4 * 8 + part * 2 + i % 2,
            c[tile][i / 4][i % 4]);
}

bool is_aligned(const HeadLinearArgs& a) {
  return a.k % 8 == 0 && a.x_stride % 4 == 0 && a.x_head_stride % 4 == 0 && is_aligned_to_16(a.x) &&
         is_aligned_to_16(a.weight);
}

template <int kTokenTiles>
void launch_tiles(const HeadLinearArgs& a) {
  const LaunchShape shape = {
      dim3(static_cast<unsigned>(ceil_div(a.n, kBlockRows)), static_cast<unsigned>(a.num_heads),
           static_cast<unsigned>(ceil_div(a.num_tokens, kTokenTiles * 16))),
      dim3(kWarps * 32)};
  launch("head_linear",
         is_aligned(a) ? head_linear_kernel<kTokenTiles, true> : head_linear_kernel<kTokenTiles, false>,
         shape, a);
}

}  // namespace

void head_linear(const HeadLinearArgs& args, ThreadPool&) {
  if (args.num_tokens <= 16)
    launch_tiles<1>(args);
  else
    launch_tiles<4>(args);
}

}  // namespace fp4moe::cuda
