// Gathers token rows by expert into slabs (token_slabs.h).
//
// Computes  slabs[row_of_slot[s]] = x[s / topk] for every slot s with a row, with zeros past K.
// Bytes     T K 2 read, each token once, and rows K 2 written.
// Bound     HBM. Gathering row by row would read a token topk times, and if x is about as large as the L2,
// most
//           of these reads would miss it.
#include "kernels/cuda/experts/sm90_wide_gemm.h"
#include "kernels/cuda/experts/work_list.cuh"
#include "kernels/cuda/layout/token_slabs.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe {
namespace {

constexpr int kThreads = 256, kTokensOfBlock = kThreads / 32;  // a warp has one token
constexpr int kPieces = 4;                                     // 16-byte pieces per lane
constexpr int kPiecesOfBlock = kPieces * 32;                   // of each token

// Returns the slab row of a slot, or -1 if it has no row.
__device__ __forceinline__ int64_t slab_row_of_slot(const TokenSlabArgs& a, const int* offsets,
                                                    int64_t slot) {
  const int row = a.rows.row_of_slot[slot];
  if (row < 0) return -1;
  const int e = expert_at(offsets, static_cast<int>(a.num_experts), row);
  return slab_first_row(e, offsets[e], 0) + row - offsets[e];
}

// Grid: (tokens, pieces of a row).
__global__ void __launch_bounds__(kThreads)
    gather_token_slabs_kernel(const __grid_constant__ TokenSlabArgs a) {
  extern __shared__ int offsets[];
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  const int num_experts = static_cast<int>(a.num_experts), topk = static_cast<int>(a.topk);
  for (int e = threadIdx.x; e <= num_experts; e += kThreads) offsets[e] = a.rows.offsets[e];
  __syncthreads();
  const int pieces = static_cast<int>(num_slabs(a.cols * 2)) * 8, lane = threadIdx.x % 32;
  const int first_piece = static_cast<int>(blockIdx.y) * kPiecesOfBlock + lane;
  const int64_t t = int64_t{blockIdx.x} * kTokensOfBlock + threadIdx.x / 32;
  if (t >= a.num_tokens) return;
  const auto* from = reinterpret_cast<const uint4*>(a.x + t * a.cols);
  uint4 values[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = first_piece + i * 32;
    values[i] = piece * 8 < a.cols ? from[piece] : uint4{0, 0, 0, 0};
  }
  const int64_t rows = num_slab_rows(a.rows.max_rows, 0, num_experts);
  for (int first = 0; first < topk; first += 32) {
    const int64_t mine =
        first + lane < topk ? slab_row_of_slot(a, offsets, t * topk + first + lane) : int64_t{-1};
    for (int k = 0; k < min(32, topk - first); ++k) {
      const int64_t to = __shfl_sync(~0u, mine, k);
      if (to < 0) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (const int piece = first_piece + i * 32; piece < pieces)
          *reinterpret_cast<uint4*>(a.slabs + slab_piece_offset(rows, to, piece)) = values[i];
    }
  }
}

}  // namespace

void gather_token_slabs(const TokenSlabArgs& a) {
  const auto blocks = static_cast<unsigned>(ceil_div(a.num_tokens, kTokensOfBlock)),
             parts = static_cast<unsigned>(ceil_div(num_slabs(a.cols * 2) * 8, kPiecesOfBlock));
  const size_t bytes = static_cast<size_t>(a.num_experts + 1) * sizeof(int);
  launch("gather_token_slabs", gather_token_slabs_kernel, {dim3(blocks, parts), kThreads, bytes}, a);
}

}  // namespace fp4moe
