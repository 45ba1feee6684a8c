// RMS norms of rows, and of the heads of a row, in place.
//
// Computes:  y = x / sqrt(mean(x^2) + eps) * weight; rows are written as bf16 and/or f32, heads in place.
// Shapes:    x [T, H] f32, any H; heads [T, num_heads, head_dim] with a row stride.
// Bytes:     T H (4 + 2 and/or 4).
// Flops:     4 T H.
// Bound:     HBM; at T = 1, the two passes' latency.
// Numerics:  f32. A thread sums every num_threads-th square, a warp its threads' sums by halves, then the
//            block its warps' sums in order: the same bits for every T.
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kHeldPerThread = 4;  // elements that a thread keeps between the passes; others are read again

__device__ float warp_sum(float sum) {
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

__device__ float block_sum(float sum) {
  __shared__ float warps[kMaxThreads / 32];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) total += warps[i];
  return total;
}

struct RowsArgs {
  const float* x;
  const float* weight;
  bf16* out_act;   // or null
  float* out_f32;  // or null; may be x
  int64_t cols;
  float eps;
};

__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(const __grid_constant__ RowsArgs a) {
  ptx::grid_dependents_launch();
  float held[kHeldPerThread], weights[kHeldPerThread], sum = 0;
  int64_t i = threadIdx.x;
#pragma unroll
  for (int j = 0; j < kHeldPerThread; ++j, i += blockDim.x) weights[j] = i < a.cols ? __ldg(a.weight + i) : 0;
  ptx::grid_dependency_wait();
  const int64_t row = blockIdx.x * a.cols;
  const float* x = a.x + row;
  i = threadIdx.x;
#pragma unroll
  for (int j = 0; j < kHeldPerThread; ++j, i += blockDim.x) held[j] = i < a.cols ? __ldcg(x + i) : 0;
#pragma unroll
  for (int j = 0; j < kHeldPerThread; ++j) sum += held[j] * held[j];
  for (; i < a.cols; i += blockDim.x) sum += __ldcg(x + i) * __ldcg(x + i);
  const float inverse = 1 / sqrtf(block_sum(sum) / static_cast<float>(a.cols) + a.eps);
  const auto put = [&](int64_t at, float value, float weight) {
    const float y = value * inverse * weight;
    if (a.out_f32 != nullptr) a.out_f32[row + at] = y;
    if (a.out_act != nullptr) a.out_act[row + at].bits = __bfloat16_as_ushort(__float2bfloat16_rn(y));
  };
  i = threadIdx.x;
#pragma unroll
  for (int j = 0; j < kHeldPerThread; ++j, i += blockDim.x)
    if (i < a.cols) put(i, held[j], weights[j]);
  for (; i < a.cols; i += blockDim.x) put(i, __ldcg(x + i), __ldg(a.weight + i));
}

struct HeadsArgs {
  float* x;
  const float* weight;
  int64_t num_heads_in_all, row_stride;
  int num_heads, head_dim;
  float eps;
};

// Each warp normalises one head.
__global__ void __launch_bounds__(256) head_norm_kernel(const __grid_constant__ HeadsArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t head = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  if (head >= a.num_heads_in_all) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* x = a.x + head / a.num_heads * a.row_stride + head % a.num_heads * a.head_dim;
  float sum = 0;
  for (int i = lane; i < a.head_dim; i += 32) sum += __ldcg(x + i) * __ldcg(x + i);
  const float inverse = 1 / sqrtf(warp_sum(sum) / static_cast<float>(a.head_dim) + a.eps);
  for (int i = lane; i < a.head_dim; i += 32) x[i] = __ldcg(x + i) * inverse * __ldg(a.weight + i);
}

}  // namespace

void rms_norm_rows(const RmsNormArgs& args) {
  const int64_t cols = args.out_act.cols;
  const int64_t threads = std::clamp<int64_t>(ceil_div(cols, 4), 32, kMaxThreads);
  launch("rms_norm", rms_norm_kernel,
         {dim3(static_cast<unsigned>(args.out_act.rows)),
          dim3(static_cast<unsigned>(ceil_div(threads, 32) * 32))},
         RowsArgs{args.x, args.weight, static_cast<bf16*>(args.out_act.data), args.out_f32, cols, args.eps});
}

void head_norm(const HeadNormArgs& args, ThreadPool&) {
  const int64_t heads = args.num_tokens * args.num_heads;
  launch("head_norm", head_norm_kernel, {dim3(static_cast<unsigned>(ceil_div(heads, 8))), dim3(256)},
         HeadsArgs{args.x, args.weight, heads, args.row_stride, args.num_heads, args.head_dim, args.eps});
}

}  // namespace fp4moe::cuda
