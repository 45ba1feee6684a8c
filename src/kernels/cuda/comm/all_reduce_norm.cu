// All-reduce over the GPUs of a group, added to the residual, and the RMS norm of the residual.
//
// Computes:  out [T, H] += sum over ranks r, in order, of partial_r [T, H], f32, each rounded to bf16 first
//            if it is sent as bf16; y = out / sqrt(mean(out^2) + eps) * weight, as bf16 and/or f32.
// Shapes:    H a multiple of 4, up to kMaxNormedCols; any T whose words fit in the heap.
// Bytes:     w T H to each of R - 1 peers, with w = 4 or 2; T H (4 + 4 + 4 + 2 and/or 4) of local memory.
// Flops:     (R + 4) T H.
// Bound:     the links for large T; for small T, the latency of a store, of a poll at the receiver and of a
//            block's sum.
// Numerics:  those of all_reduce.cu and rms_norm.cu, with the same bits.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/partials.cuh"
#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

constexpr int kVectors = kMaxNormedCols / (4 * kMaxNormThreads);  // of four elements, per thread

struct NormArgs {
  CommGroup group;
  CommOp op;
  const float* partial;
  float* out;
  const float* weight;
  bf16* act;   // or null
  float* f32;  // or null
  int64_t rows, cols;
  float eps;
};

// Four elements as they are sent.
struct F32Words {
  using Words = uint4;
  static __device__ __forceinline__ Words of(const float4& v) {
    return sendable(
        uint4{__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)});
  }
  static __device__ __forceinline__ float4 values(const Words& w) {
    return {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
  }
};
struct Bf16Words {
  using Words = uint2;
  static __device__ __forceinline__ Words of(const float4& v) {
    const Words w = bf16_words(v);
    return {sendable(w.x), sendable(w.y)};
  }
  static __device__ __forceinline__ float4 values(const Words& w) {
    return {__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u), __uint_as_float(w.y << 16),
            __uint_as_float(w.y & 0xffff0000u)};
  }
};

// This thread's vectors of a row.
struct RowPart {
  float4 v[kVectors];

  static __device__ __forceinline__ RowPart load(const float* row, int64_t vectors) {
    RowPart part;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int64_t i = threadIdx.x + int64_t{j} * blockDim.x;
      part.v[j] = i < vectors ? __ldcg(reinterpret_cast<const float4*>(row) + i) : float4{};
    }
    return part;
  }
  __device__ __forceinline__ void operator+=(const RowPart& other) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      v[j].x += other.v[j].x, v[j].y += other.v[j].y;
      v[j].z += other.v[j].z, v[j].w += other.v[j].w;
    }
  }
};

// Calls f(j, i) for each vector i of a row that this thread has.
template <class Function>
__device__ __forceinline__ void for_vectors(int64_t vectors, const Function& f) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (const int64_t i = threadIdx.x + int64_t{j} * blockDim.x; i < vectors) f(j, i);
}

// Returns the row that `peer` stores at `from`, and marks its words as unsent again.
template <class Format>
__device__ __forceinline__ RowPart take_row(const Operation& o, int peer, typename Format::Words* from,
                                            int64_t vectors) {
  typename Format::Words words[kVectors];
  o.wait(peer, [&](uint32_t&) {
    for_vectors(vectors, [&](int j, int64_t i) { words[j] = load_words(from + i); });
    bool all = true;
    for_vectors(vectors, [&](int j, int64_t) { all &= has_arrived(words[j]); });
    return all;
  });
  RowPart part{};
  for_vectors(vectors, [&](int j, int64_t i) {
    part.v[j] = Format::values(words[j]);
    mark_unsent(from + i);
  });
  return part;
}

// A block takes every gridDim.x-th row.
template <class Format>
__global__ void __launch_bounds__(kMaxNormThreads) norm_kernel(const __grid_constant__ NormArgs a) {
  using Words = typename Format::Words;
  ptx::grid_dependents_launch();
  const int64_t vectors = a.cols / 4;
  RowPart weight;
  for_vectors(vectors,
              [&](int j, int64_t i) { weight.v[j] = __ldg(reinterpret_cast<const float4*>(a.weight) + i); });
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  const int me = a.group.rank, size = a.group.size;
  const auto row_at = [&](int rank, int source, int64_t row) {
    return words_at<Words>(o, rank, source) + row * vectors;
  };
  const auto send = [&](int64_t row) {
    if (row >= a.rows) return;
    const RowPart mine = RowPart::load(a.partial + row * a.cols, vectors);
    for (int r = 0; r < size; ++r)
      if (r != me)
        for_vectors(vectors,
                    [&](int j, int64_t i) { store_words(row_at(r, me, row) + i, Format::of(mine.v[j])); });
  };
  send(blockIdx.x);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    send(row + gridDim.x);  // the links carry it during the sum
    const int64_t first = row * a.cols;
    RowPart residual = RowPart::load(a.out + first, vectors),
            mine = RowPart::load(a.partial + first, vectors);
    for (float4& v : mine.v) v = Format::values(Format::of(v));
    RowPart sum{};
    for (int r = 0; r < size; ++r)
      sum += r == me ? mine : take_row<Format>(o, r, row_at(me, r, row), vectors);
    residual += sum;
    float squares = 0;
    for (const float4& v : residual.v) squares = sum_of_squares(squares, v);
    const float inverse = inverse_rms(block_sum(squares), a.cols, a.eps);
    for_vectors(vectors, [&](int j, int64_t i) {
      const float4 y = normed(residual.v[j], inverse, weight.v[j]);
      reinterpret_cast<float4*>(a.out + first)[i] = residual.v[j];
      if (a.f32 != nullptr) reinterpret_cast<float4*>(a.f32 + first)[i] = y;
      if (a.act != nullptr) reinterpret_cast<uint2*>(a.act + first)[i] = bf16_words(y);
    });
    __syncthreads();  // before the next row's block_sum()
  }
}

}  // namespace

void all_reduce_norm(const AllReduceNormArgs& args) {
  const AllReduceArgs& sum = args.sum;
  const RmsNormArgs& norm = args.norm;
  const int64_t rows = norm.out_act.rows, cols = norm.out_act.cols;
  FP4MOE_CHECK(
      sum.n == rows * cols && norm.x == sum.out && !sum.two_shot && cols % 4 == 0 && cols <= kMaxNormedCols &&
          sum.n <= max_sum_elements(sum.group, sum.bf16_partials, false),
      "all_reduce_norm of " + std::to_string(rows) + " rows of " + std::to_string(cols) + " elements");
  // Blocks of up to four times as many threads as those that max_blocks counts.
  const auto blocks = std::clamp<int64_t>(rows, 1, std::max(1, sum.group.max_blocks / 2));
  launch("all_reduce_norm", sum.bf16_partials ? norm_kernel<Bf16Words> : norm_kernel<F32Words>,
         {dim3(static_cast<unsigned>(blocks)), dim3(num_norm_threads(cols))},
         NormArgs{sum.group, sum.op, sum.partial, sum.out, norm.weight, static_cast<bf16*>(norm.out_act.data),
                  norm.out_f32, rows, cols, norm.eps});
}

}  // namespace fp4moe::cuda
