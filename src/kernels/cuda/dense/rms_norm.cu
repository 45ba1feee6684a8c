// RMS norms of rows, and of the heads of a row, in place.
//
// Computes:  y = x / sqrt(mean(x^2) + eps) * weight; rows are written as bf16 and/or f32, heads in place.
// Shapes:    x [T, H] f32, any H; heads [T, num_heads, head_dim] with a row stride.
// Bytes:     T H (4 + 2 and/or 4).
// Flops:     4 T H.
// Bound:     HBM; at T = 1, the two passes' latency.
// Numerics:  f32. The order of a row's sum is that of ptx/block_norm.cuh: the same bits for every T. In a
//            head, a lane sums every 32nd square, the warp its lanes' sums by halves.
//
// A row has a block; many rows have a warp each, whose loads are all in flight at once and which waits for no
// other warp.
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kHeld = 2;  // vectors that a thread keeps between the passes; others are read again

struct RowsArgs {
  const float* x;
  const float* weight;
  bf16* out_act;   // or null
  float* out_f32;  // or null; may be x
  int64_t rows, cols;
  float eps;
};

// Vectors of four elements of a row. The last vector of a row whose length is not a multiple of four is
// short.
template <bool kWhole>
struct Vectors {
  static __device__ __forceinline__ float4 load(const float* row, int64_t i, int64_t cols) {
    if constexpr (kWhole) return __ldcg(reinterpret_cast<const float4*>(row) + i);
    float v[4] = {};
    for (int j = 0; j < 4; ++j)
      if (4 * i + j < cols) v[j] = __ldcg(row + 4 * i + j);
    return {v[0], v[1], v[2], v[3]};
  }
  static __device__ __forceinline__ void store(float* row, int64_t i, int64_t cols, const float4& v) {
    if constexpr (kWhole) {
      reinterpret_cast<float4*>(row)[i] = v;
      return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
    for (int j = 0; j < 4; ++j)
      if (4 * i + j < cols) row[4 * i + j] = values[j];
  }
  static __device__ __forceinline__ void store(bf16* row, int64_t i, int64_t cols, const float4& v) {
    const uint2 words = bf16_words(v);
    if constexpr (kWhole) {
      reinterpret_cast<uint2*>(row)[i] = words;
      return;
    }
    const uint32_t values[4] = {words.x & 0xffff, words.x >> 16, words.y & 0xffff, words.y >> 16};
    for (int j = 0; j < 4; ++j)
      if (4 * i + j < cols) row[4 * i + j].bits = static_cast<uint16_t>(values[j]);
  }
};

template <bool kWhole>
__global__ void __launch_bounds__(kMaxNormThreads) rms_norm_kernel(const __grid_constant__ RowsArgs a) {
  using V = Vectors<kWhole>;
  ptx::grid_dependents_launch();
  const int64_t vectors = (a.cols + 3) / 4;
  float4 held[kHeld], weights[kHeld];
  float sum = 0;
  int64_t i = threadIdx.x;
#pragma unroll
  for (int j = 0; j < kHeld; ++j, i += blockDim.x)
    if (i < vectors) weights[j] = V::load(a.weight, i, a.cols);
  ptx::grid_dependency_wait();
  const int64_t row = blockIdx.x * a.cols;
  const float* x = a.x + row;
  i = threadIdx.x;
#pragma unroll
  for (int j = 0; j < kHeld; ++j, i += blockDim.x) held[j] = i < vectors ? V::load(x, i, a.cols) : float4{};
#pragma unroll
  for (int j = 0; j < kHeld; ++j) sum = sum_of_squares(sum, held[j]);
  for (; i < vectors; i += blockDim.x) sum = sum_of_squares(sum, V::load(x, i, a.cols));
  const float inverse = inverse_rms(block_sum(sum), a.cols, a.eps);
  const auto put = [&](int64_t at, const float4& value, const float4& weight) {
    const float4 y = normed(value, inverse, weight);
    if (a.out_f32 != nullptr) V::store(a.out_f32 + row, at, a.cols, y);
    if (a.out_act != nullptr) V::store(a.out_act + row, at, a.cols, y);
  };
  i = threadIdx.x;
#pragma unroll
  for (int j = 0; j < kHeld; ++j, i += blockDim.x)
    if (i < vectors) put(i, held[j], weights[j]);
  for (; i < vectors; i += blockDim.x) put(i, V::load(x, i, a.cols), V::load(a.weight, i, a.cols));
}

constexpr int kRowWarps = 4;  // rows of a block that has a warp for each

// Rows of up to 4 * 32 * kVectors columns, a multiple of 4. A block of rms_norm_kernel has one vector per
// thread for such a row, and its warp j has vectors 32 j ... 32 j + 31, whose sums are added in order.
template <int kVectors>
__global__ void __launch_bounds__(kRowWarps * 32) rms_norm_warp_kernel(const __grid_constant__ RowsArgs a) {
  using V = Vectors<true>;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int lane = static_cast<int>(threadIdx.x) % 32, vectors = static_cast<int>(a.cols / 4);
  const int64_t number = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32, row = number * a.cols;
  if (number >= a.rows) return;
  float4 held[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    held[j] = 32 * j + lane < vectors ? V::load(a.x + row, 32 * j + lane, a.cols) : float4{};
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) sum += warp_sum(sum_of_squares(0, held[j]));
  const float inverse = inverse_rms(sum, a.cols, a.eps);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = 32 * j + lane;
    if (i >= vectors) break;
    const float4 y = normed(held[j], inverse, __ldg(reinterpret_cast<const float4*>(a.weight) + i));
    if (a.out_f32 != nullptr) V::store(a.out_f32 + row, i, a.cols, y);
    if (a.out_act != nullptr) V::store(a.out_act + row, i, a.cols, y);
  }
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
  const float inverse = inverse_rms(warp_sum(sum), a.head_dim, a.eps);
  for (int i = lane; i < a.head_dim; i += 32) x[i] = __ldcg(x + i) * inverse * __ldg(a.weight + i);
}

}  // namespace

void rms_norm_rows(const RmsNormArgs& args) {
  constexpr int64_t kManyRows = 1024;
  const int64_t rows = args.out_act.rows, cols = args.out_act.cols;
  const RowsArgs a = {args.x, args.weight, static_cast<bf16*>(args.out_act.data), args.out_f32, rows,
                      cols,   args.eps};
  if (rows >= kManyRows && cols % 4 == 0 && cols <= 4096) {
    launch("rms_norm", cols <= 2048 ? rms_norm_warp_kernel<16> : rms_norm_warp_kernel<32>,
           {dim3(static_cast<unsigned>(ceil_div(rows, kRowWarps))), dim3(kRowWarps * 32)}, a);
    return;
  }
  launch("rms_norm", cols % 4 == 0 ? rms_norm_kernel<true> : rms_norm_kernel<false>,
         {dim3(static_cast<unsigned>(rows)), dim3(num_norm_threads(cols))}, a);
}

void head_norm(const HeadNormArgs& args, ThreadPool&) {
  const int64_t heads = args.num_tokens * args.num_heads;
  launch("head_norm", head_norm_kernel, {dim3(static_cast<unsigned>(ceil_div(heads, 8))), dim3(256)},
         HeadsArgs{args.x, args.weight, heads, args.row_stride, args.num_heads, args.head_dim, args.eps});
}

}  // namespace fp4moe::cuda
