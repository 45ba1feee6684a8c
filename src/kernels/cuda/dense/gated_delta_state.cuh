// The arithmetic of the gated delta net's recurrence, in which all of its kernels must agree bit by bit.
// Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/gated_delta.h"

namespace fp4moe::cuda {

// Approximate quotients and roots, to 2 units in the last place: they have no branches, so that a thread's
// chains of them overlap.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1, 1 + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1 + expf(-x)); }

// Factors of a row, from the sums of the squares of q and k.
__device__ __forceinline__ float factor_of_q(float squares, int dk) {
  return rsqrtf(squares + kDeltaNormEps) * (1 / sqrtf(static_cast<float>(dk)));
}
__device__ __forceinline__ float factor_of_k(float squares) { return rsqrtf(squares + kDeltaNormEps); }

// The factor of the state, from the row's input a.
__device__ __forceinline__ float shrink_of(float a, float decay, float dt_bias) {
  const float x = a + dt_bias, softplus = __fadd_rn(fmaxf(x, 0), log1pf(expf(-fabsf(x))));
  return expf(decay * softplus);
}

// A row's change of a column of the state, per unit of k before the norm. predicted: k^T S before the row.
__device__ __forceinline__ float change_of(float of_k, float shrink, float beta, float v, float predicted) {
  return of_k * beta * fmaf(-(shrink * of_k), predicted, v);
}

// A column's output with norm and gate. squares: the sum over the head's outputs; gate: silu(z).
__device__ __forceinline__ float gated_output(float o, float squares, int dv, float eps, float weight,
                                              float gate) {
  return o * rsqrtf(squares / static_cast<float>(dv) + eps) * weight * gate;
}

// Adds up the parts [groups, columns] of a column.
__device__ __forceinline__ float sum_of_groups(const float* parts, int groups, int columns, int column) {
  float sum = 0;
  for (int g = 0; g < groups; ++g) sum += parts[g * columns + column];
  return sum;
}

// A thread's rows of one column of the state, in registers. In memory it is used once per step, so the L2 may
// replace it first.
template <int kRows>
class StateColumn {
 public:
  // state: the head's, at the column, [dk, dv]; num_rows: of this thread, from row first on.
  __device__ StateColumn(float* state, int dv, int first, int num_rows)
      : state_(state), dv_(dv), first_(first), num_rows_(num_rows) {}
  // kRows rows, which are only loaded from copies, and stored to them.
  __device__ StateColumn(int dv, int first) : StateColumn(nullptr, dv, first, kRows) {}
  __device__ void load(bool is_new) {
    const float* at = first();
#pragma unroll
    for (int i = 0; i < kRows; ++i, at += dv_) s_[i] = is_new || i >= num_rows_ ? 0 : __ldcs(at);
  }
  __device__ void store() const {
    float* at = first();
#pragma unroll
    for (int i = 0; i < kRows; ++i, at += dv_)
      if (i < num_rows_) __stcs(at, s_[i]);
  }
  // The same from and to a copy of this thread's rows, [kRows, dv] at the column.
  __device__ void load_copy(const float* rows, bool is_new) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) s_[i] = is_new ? 0 : rows[i * dv_];
  }
  __device__ void store_copy(float* rows) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i * dv_] = s_[i];
  }
  // k^T S over the rows; k: of the head.
  __device__ float dot(const float* k) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 k4 = four(k, i);
      sum += four_products(k4, i);
    }
    return sum;
  }
  // S <- shrink S + k change; returns q^T S over the rows.
  __device__ float update(float shrink, float change, const float* k, const float* q) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 k4 = four(k, i), q4 = four(q, i);
      s_[i] = fmaf(k4.x, change, shrink * s_[i]);
      s_[i + 1] = fmaf(k4.y, change, shrink * s_[i + 1]);
      s_[i + 2] = fmaf(k4.z, change, shrink * s_[i + 2]);
      s_[i + 3] = fmaf(k4.w, change, shrink * s_[i + 3]);
      sum += four_products(q4, i);
    }
    return sum;
  }

 private:
  // Computed anew for each use: the rows' addresses would take more registers than their values.
  __device__ float* first() const {
    float* at = state_ + int64_t{first_} * dv_;
    asm volatile("" : "+l"(at));
    return at;
  }
  __device__ float four_products(const float4& by, int i) const {
    return fmaf(by.w, s_[i + 3], fmaf(by.z, s_[i + 2], fmaf(by.y, s_[i + 1], by.x * s_[i])));
  }
  __device__ float4 four(const float* x, int row) const {
    return *reinterpret_cast<const float4*>(x + first_ + row);
  }
  float* const state_;
  const int dv_, first_, num_rows_;
  float s_[kRows];
};

}  // namespace fp4moe::cuda
