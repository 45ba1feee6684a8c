// Combines the rows of experts into tokens.
//
// Computes  out[t] (+)= sum over k, in top-k order, of weight[t, k] * y[row_of_slot[t, k]]; on any GPU.
// Bytes     T topk H elements of y (2 or 4 bytes each) read, T H elements of out written.
// Bound     HBM or L2.
// Numerics  f32, one chain of multiply-adds per column.
#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/row_piece.cuh"

namespace fp4moe {
namespace {

using cuda::add_scaled, cuda::kPieceColumns, cuda::RowPiece, cuda::store_piece, cuda::unpack_piece;

constexpr int kThreads = 128, kColumns = kPieceColumns;

__device__ __forceinline__ RowPiece load_piece(const float* p) {
  const auto* v = reinterpret_cast<const float4*>(p);
  return unpack_piece(v[0], v[1]);
}
__device__ __forceinline__ RowPiece load_piece(const bf16* p) {
  return unpack_piece(*reinterpret_cast<const uint4*>(p));
}
__device__ __forceinline__ RowPiece load_y(const MoeCombineArgs& a, int64_t at, bool is_bf16) {
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
  RowPiece sum = {};
#pragma unroll 4
  for (int k = 0; k < topk; ++k) {
    const int64_t row = rows[k];
    RowPiece piece = {};
    const float weight = row < 0 ? 0 : weights == nullptr ? 1 : weights[k];
    if (row >= 0) piece = load_y(a, row * a.hidden_size + column, kBf16);
    add_scaled(sum, weight, piece);
  }
  const int64_t at = token * a.hidden_size + column;
  if (a.out_bf16 != nullptr) store_piece(a.out_bf16 + at, sum);
  if (a.out == nullptr) return;
  if (a.accumulate) {
    const RowPiece old = load_piece(a.out + at);
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
