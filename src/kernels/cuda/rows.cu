// Ops that move rows: embed, add, gather_rows, copy_heads.
//
// Computes:  as kernels/ops.h says, element by element.
// Bytes:     what they read and write.   Bound: HBM; at T = 1 a launch.
// Numerics:  exact, but for add's one rounding.
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx_sm90.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPerThread = 4;  // elements, so that few-token rows have blocks enough

dim3 blocks_of(int64_t rows, int64_t cols) {
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(cols, kThreads * kPerThread)));
}

// The columns that this thread handles of a row of `cols`.
template <class Function>
__device__ void each_column(int64_t cols, Function function) {
  const int64_t first = blockIdx.y * kThreads * kPerThread + threadIdx.x;
#pragma unroll
  for (int64_t j = 0; j < kPerThread; ++j)
    if (const int64_t i = first + j * kThreads; i < cols) function(i);
}

__global__ void __launch_bounds__(kThreads) embed_kernel(const __grid_constant__ EmbedArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t t = blockIdx.x;
  const bf16* row = a.table + __ldcg(a.ids + t) * a.hidden_size;
  each_column(a.hidden_size, [&](int64_t i) { a.out[t * a.hidden_size + i] = bf16_to_float(row[i]); });
}

__global__ void __launch_bounds__(kThreads) add_kernel(const __grid_constant__ AddArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t first = blockIdx.x * kThreads * kPerThread + threadIdx.x;
#pragma unroll
  for (int64_t j = 0; j < kPerThread; ++j)
    if (const int64_t i = first + j * kThreads; i < a.count) a.out[i] = __ldcg(a.out + i) + __ldcg(a.x + i);
}

__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const __grid_constant__ GatherRowsArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t words = a.row_bytes / 4;
  const auto* from = static_cast<const uint32_t*>(a.x) + __ldcg(a.rows + blockIdx.x) * words;
  auto* to = static_cast<uint32_t*>(a.out) + blockIdx.x * words;
  each_column(words, [&](int64_t i) { to[i] = __ldcg(from + i); });
}

__global__ void __launch_bounds__(kThreads) copy_heads_kernel(const __grid_constant__ CopyHeadsArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t t = blockIdx.x;
  each_column(a.num_heads * a.n, [&](int64_t i) {
    const int64_t head = i / a.n, at = i % a.n;
    a.out[t * a.out_stride + head * a.out_head_stride + at] =
        __ldcg(a.x + t * a.x_stride + head * a.x_head_stride + at);
  });
}

}  // namespace

void embed(const EmbedArgs& args, ThreadPool&) {
  launch("embed", embed_kernel, {blocks_of(args.num_tokens, args.hidden_size), dim3(kThreads)}, args);
}

void add(const AddArgs& args, ThreadPool&) {
  launch("add", add_kernel,
         {dim3(static_cast<unsigned>(ceil_div(args.count, kThreads * kPerThread))), dim3(kThreads)}, args);
}

void gather_rows(const GatherRowsArgs& args, ThreadPool&) {
  launch("gather_rows", gather_rows_kernel, {blocks_of(args.num_rows, args.row_bytes / 4), dim3(kThreads)},
         args);
}

void copy_heads(const CopyHeadsArgs& args, ThreadPool&) {
  launch("copy_heads", copy_heads_kernel,
         {blocks_of(args.num_tokens, args.num_heads * args.n), dim3(kThreads)}, args);
}

}  // namespace fp4moe::cuda
