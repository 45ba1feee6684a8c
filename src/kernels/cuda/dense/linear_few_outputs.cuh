// What linear_few.cu does with its sums: it adds those of the warps, scales them, adds bias and old value,
// and stores the outputs or sends them to a group's ranks. Device code only.
#pragma once

#include "kernels/cuda/comm/fused_sums.cuh"
#include "kernels/cuda/dense/linear_few_norm.cuh"
#include "kernels/cuda/dense/linear_few_weights.cuh"

namespace fp4moe::few_linear {

struct NoSums {};

struct StoredOutput {
  const FewArgs& a;
  __device__ explicit StoredOutput(const FewArgs& args, const NoSums& = {}) : a(args) {}
  __device__ void write(int64_t element, float value) const { a.out[element] = value; }
};
// Make it before the sums are ready (cuda::SumSender).
struct SentOutput {
  cuda::SumSender sender;
  __device__ SentOutput(const FewArgs&, const SumsToSend& sums) : sender(sums) {
    if (blockIdx.x == 0 && threadIdx.x == 0) sender.announce(sums.tag);
  }
  __device__ void write(int64_t element, float value) const { sender.send(element, value); }
};
template <class Sums>
struct OutputOf {
  using Type = StoredOutput;
};
template <>
struct OutputOf<SumsToSend> {
  using Type = SentOutput;
};

// Puts a warp's sums for a tile into `sums` [T][group_rows], beginning at row `row` of the group.
template <bool kTwoHalves>
__device__ __forceinline__ void keep_sums(const FewArgs& a, const float (&c)[2][2][4], int row, float* sums) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, q = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < (kTwoHalves ? 2 : 1); ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int t = half * 8 + q * 2 + i % 2; t < a.num_tokens)
        sums[t * a.layout.group_rows + row + g + i / 2 * kStageRows] = c[half][0][i] + c[half][1][i];
}

// A row's scale (kFp8Rows) and the values added to a sum. They are loaded before the sum is ready: at the end
// of the kernel, each load would cost as much as 2 MB of weights.
struct Addend {
  float scale = 1, bias = 0, before = 0;  // before: out's old value
};

template <FewWeights kWeights>
__device__ Addend addend_of(const FewArgs& a, int first, int rows, int i) {
  Addend addend;
  if (i >= a.num_tokens * rows) return addend;
  const int row = first + i % rows;
  if (kWeights == FewWeights::kFp8Rows)
    addend.scale = __ldg(a.fp8.scales + row / static_cast<int>(a.fp8.row_block));
  if (a.bias != nullptr) addend.bias = __ldg(a.bias + row);
  if (a.accumulate) addend.before = __ldcg(a.out + static_cast<int64_t>(i / rows) * a.n + row);
  return addend;
}

// Adds the warps' sums for a group in warp order, and writes the outputs. `addend` belongs to this thread's
// first output.
template <bool kNorm, FewWeights kWeights, class Output>
__device__ void write_outputs(const FewArgs& a, const uint8_t* shared, int first, int rows, Addend addend,
                              const Output& output) {
  const float* sums = reinterpret_cast<const float*>(shared + a.layout.sums);
  for (int i = static_cast<int>(threadIdx.x); i < a.num_tokens * rows; i += kThreads) {
    if (i >= kThreads) addend = addend_of<kWeights>(a, first, rows, i);
    const int t = i / rows, r = i % rows;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      sum += sums[(warp * a.num_tokens + t) * a.layout.group_rows + r];
    if (kNorm) sum *= inverse_rms(a, shared, t);
    sum = kWeights == FewWeights::kFp8Rows ? fmaf(addend.scale, sum, addend.bias) : sum + addend.bias;
    output.write(static_cast<int64_t>(t) * a.n + first + r, sum + addend.before);
  }
}

}  // namespace fp4moe::few_linear
