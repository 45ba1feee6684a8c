// Combines the rows of experts into tokens.
//
// Computes  out[t] (+)= sum over k, in top-k order, of weight[t, k] * y[row_of_slot[t, k]], then
//           out[t] += sigmoid(gate . x[t]) * added[t]; on any GPU.
// Bytes     T topk H elements of y (2 or 4 bytes each) read, T H elements of out written (accumulate: and
//           read); added rows: T H elements of them (2 or 4 bytes) and of x (4 bytes) read.
// Bound     HBM or L2.
// Numerics  f32, one chain of multiply-adds per column; out's old value and the added row are added to the
//           finished sum, one after the other. The same bits as without added rows, and then the ops
//           sigmoid_gate and add.
#include "base/check.h"
#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/row_gate.cuh"
#include "kernels/cuda/ptx/row_piece.cuh"
#include "kernels/cuda/ptx/slot_rows.cuh"

namespace fp4moe {
namespace {

using cuda::add_scaled, cuda::kGateThreads, cuda::kPieceColumns, cuda::RowPiece, cuda::store_piece;

constexpr int kThreads = 128, kColumns = kPieceColumns;

template <class T>
__device__ __forceinline__ RowPiece load_piece(const T* p) {
  return cuda::to_piece(cuda::load_raw(p, 0));
}

// The weighted sum of a token's rows.
template <class T>
__device__ __forceinline__ RowPiece weighted_sum(const MoeCombineArgs& a, const T* y, int64_t token,
                                                 int64_t column) {
  RowPiece sum = {};
  cuda::SlotRows{a.row_of_slot, a.weights, static_cast<int>(a.topk)}.for_slots(
      token, [&](int64_t row) { return cuda::load_raw(y + row * a.hidden_size + column, 0); },
      [&](float weight, const auto& raw) { add_scaled(sum, weight, cuda::to_piece(raw)); });
  return sum;
}
template <bool kBf16>
__device__ __forceinline__ RowPiece weighted_sum(const MoeCombineArgs& a, int64_t token, int64_t column) {
  if constexpr (kBf16)
    return weighted_sum(a, a.y_bf16, token, column);
  else
    return weighted_sum(a, a.y, token, column);
}

__device__ __forceinline__ void add_piece(RowPiece& sum, const RowPiece& piece) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum.v[i] += piece.v[i];
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ MoeCombineArgs a) {
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kColumns;
  const int64_t token = blockIdx.x;
  if (column >= a.hidden_size) return;
  const int64_t at = token * a.hidden_size + column;
  cuda::F32Raw before{};  // these are under way during the sum
  uint4 added{};
  if (a.accumulate) before = cuda::load_raw(a.out + at, 0);
  if (a.added.rows_bf16 != nullptr) added = cuda::load_raw(a.added.rows_bf16 + at, 0);
  RowPiece sum = weighted_sum<kBf16>(a, token, column);
  if (a.out_bf16 != nullptr) store_piece(a.out_bf16 + at, sum);
  if (a.out == nullptr) return;
  if (a.accumulate) add_piece(sum, cuda::to_piece(before));
  if (a.added.rows_bf16 != nullptr) add_piece(sum, cuda::to_piece(added));
  store_piece(a.out + at, sum);
}

// With added rows that have a gate or are f32. A block has a whole token, since the gate needs all columns.
template <bool kBf16>
__global__ void __launch_bounds__(kGateThreads)
    combine_added_kernel(const __grid_constant__ MoeCombineArgs a) {
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  const AddedRows& added = a.added;
  const int64_t row = blockIdx.x * a.hidden_size;
  const float gate = added.gate == nullptr ? 1 : cuda::row_gate(added.x + row, added.gate, a.hidden_size);
  for (int64_t column = threadIdx.x * kColumns; column < a.hidden_size; column += kGateThreads * kColumns) {
    const int64_t at = row + column;
    RowPiece piece =
        added.rows_bf16 != nullptr ? load_piece(added.rows_bf16 + at) : load_piece(added.rows + at);
#pragma unroll
    for (float& value : piece.v) value = __fmul_rn(value, gate);  // not part of a multiply-add
    RowPiece sum = weighted_sum<kBf16>(a, blockIdx.x, column);
    if (a.accumulate) add_piece(sum, load_piece(a.out + at));
    add_piece(sum, piece);
    store_piece(a.out + at, sum);
  }
}

}  // namespace

void moe_combine(const MoeCombineArgs& a) {
  if (a.num_tokens == 0) return;
  const auto tokens = static_cast<unsigned>(a.num_tokens);
  FP4MOE_CHECK(!a.accumulate || a.out != nullptr, "only the f32 output has an old value");
  FP4MOE_CHECK(!a.added.exist() || (a.out != nullptr && a.out_bf16 == nullptr),
               "rows can only be added to an f32 output");
  if (a.added.rows != nullptr || a.added.gate != nullptr)
    return launch("moe_combine_added",
                  a.y_bf16 != nullptr ? combine_added_kernel<true> : combine_added_kernel<false>,
                  {dim3(tokens), dim3(kGateThreads)}, a);
  const dim3 grid(tokens, static_cast<unsigned>((a.hidden_size / kColumns + kThreads - 1) / kThreads));
  launch("moe_combine", a.y_bf16 != nullptr ? combine_kernel<true> : combine_kernel<false>, {grid, kThreads},
         a);
}

}  // namespace fp4moe
