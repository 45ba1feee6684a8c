// Gathers token rows by expert into slabs (token_slabs.h).
//
// Computes  slabs[row r] = x[slot_of_row[r] / topk], with zeros past K.
// Bytes     rows * K * 2 read (from L2 after the first of a token's topk reads) and written.
// Bound     HBM.
#include "kernels/cuda/experts/sm90_wide_gemm.h"
#include "kernels/cuda/experts/work_list.cuh"
#include "kernels/cuda/layout/token_slabs.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe {
namespace {

constexpr int kThreads = 256, kRowsOfBlock = 16;

__global__ void __launch_bounds__(kThreads) gather_token_slabs_kernel(const TokenSlabArgs a) {
  extern __shared__ int offsets[];
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  const int num_experts = static_cast<int>(a.num_experts);
  for (int e = threadIdx.x; e <= num_experts; e += kThreads) offsets[e] = a.rows.offsets[e];
  __syncthreads();
  const int pieces = static_cast<int>(num_slabs(a.cols * 2)) * 8, lane = threadIdx.x % 32;
  const int64_t rows = num_slab_rows(a.rows.max_rows, 0, num_experts);
  for (int i = threadIdx.x / 32; i < kRowsOfBlock; i += kThreads / 32) {
    const int row = blockIdx.x * kRowsOfBlock + i;
    if (row >= offsets[num_experts]) return;
    const int e = expert_at(offsets, num_experts, row);
    const int64_t to = slab_first_row(e, offsets[e], 0) + row - offsets[e];
    const auto* from =
        reinterpret_cast<const uint4*>(a.x + int64_t{a.rows.slot_of_row[row]} / a.topk * a.cols);
    for (int piece = lane; piece < pieces; piece += 32)
      *reinterpret_cast<uint4*>(a.slabs + slab_piece_offset(rows, to, piece)) =
          piece * 8 < a.cols ? from[piece] : uint4{0, 0, 0, 0};
  }
}

}  // namespace

void gather_token_slabs(const TokenSlabArgs& a) {
  const auto blocks = static_cast<unsigned>(ceil_div(a.rows.max_rows, kRowsOfBlock));
  const size_t bytes = static_cast<size_t>(a.num_experts + 1) * sizeof(int);
  launch("gather_token_slabs", gather_token_slabs_kernel, {blocks, kThreads, bytes}, a);
}

}  // namespace fp4moe
