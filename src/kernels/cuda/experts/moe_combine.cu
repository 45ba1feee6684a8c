// Combines the rows of experts into tokens.
//
// Computes  out[t] (+)= sum over k, in top-k order, of weight[t, k] * y[row_of_slot[t, k]]; on any GPU.
// Bytes     T topk H of y (2 or 4 bytes each) read, T H written.
// Bound     HBM or L2.
// Numerics  f32, one chain per column.
#include <cuda_bf16.h>

#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe {
namespace {

constexpr int kThreads = 128, kColumns = 8;

struct Piece {
  float v[kColumns];
};

__device__ __forceinline__ Piece load_piece(const float* p) {
  const auto* v = reinterpret_cast<const float4*>(p);
  const float4 a = v[0], b = v[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
__device__ __forceinline__ Piece load_piece(const bf16* p) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  Piece piece;
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    piece.v[2 * i] = __uint_as_float(words[i] << 16);
    piece.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
  }
  return piece;
}

__device__ __forceinline__ void store_piece(float* p, const Piece& s) {
  auto* v = reinterpret_cast<float4*>(p);
  v[0] = {s.v[0], s.v[1], s.v[2], s.v[3]};
  v[1] = {s.v[4], s.v[5], s.v[6], s.v[7]};
}
__device__ __forceinline__ void store_piece(bf16* p, const Piece& s) {
  __nv_bfloat162 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(s.v[2 * i], s.v[2 * i + 1]);
  *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(pairs);
}

__device__ __forceinline__ Piece load_y(const MoeCombineArgs& a, int64_t at, bool is_bf16) {
  return is_bf16 ? load_piece(a.y_bf16 + at) : load_piece(a.y + at);
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads) combine_kernel(const MoeCombineArgs a) {
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kColumns;
  const int64_t token = blockIdx.x;
  if (column >= a.hidden_size) return;
  const int topk = static_cast<int>(a.topk);
  const int32_t* rows = a.row_of_slot + token * topk;
  const float* weights = a.weights == nullptr ? nullptr : a.weights + token * topk;
  Piece sum = {};
#pragma unroll 4
  for (int k = 0; k < topk; ++k) {
    const int64_t row = rows[k];
    Piece piece = {};
    const float weight = row < 0 ? 0 : weights == nullptr ? 1 : weights[k];
    if (row >= 0) piece = load_y(a, row * a.hidden_size + column, kBf16);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum.v[i] = fmaf(weight, piece.v[i], sum.v[i]);
  }
  const int64_t at = token * a.hidden_size + column;
  if (a.out_bf16 != nullptr) store_piece(a.out_bf16 + at, sum);
  if (a.out == nullptr) return;
  if (a.accumulate) {
    const Piece old = load_piece(a.out + at);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum.v[i] += old.v[i];
  }
  store_piece(a.out + at, sum);
}

}  // namespace

void moe_combine(const MoeCombineArgs& a) {
  if (a.num_tokens == 0) return;
  const dim3 grid(static_cast<unsigned>(a.num_tokens),
                  static_cast<unsigned>((a.hidden_size / kColumns + kThreads - 1) / kThreads));
  launch("moe_combine", a.y_bf16 != nullptr ? combine_kernel<true> : combine_kernel<false>, {grid, kThreads},
         a);
}

}  // namespace fp4moe
