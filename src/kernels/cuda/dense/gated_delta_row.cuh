// What the kernels for one row per sequence share (gated_delta_row.cu, gated_delta_stream.cu). Device code
// only.
#pragma once

#include <cuda_bf16.h>

#include "formats/bf16.h"
#include "kernels/cuda/dense/gated_delta_state.cuh"

namespace fp4moe::cuda {

struct DeltaRow {
  static constexpr int kDim = 128;  // dk and dv
  static constexpr int kTaps = 4, kKept = kTaps - 1;
  static constexpr int kRows = 32, kGroups = kDim / kRows;  // rows of a thread; groups of them
};

struct RowParams {
  GatedDeltaArgs args;
  DeviceStates sequences;
};

// The row and slot of a sequence, as loaded: nothing waits for them before their first use.
struct RowSequence {
  int row, end, slot, position;
  __device__ __forceinline__ RowSequence(const DeviceStates& of, int i)
      : row(of.first_row[i]), end(of.first_row[i + 1]), slot(of.slots[i]), position(of.first_position[i]) {}
  __device__ __forceinline__ bool has_row() const { return row < end; }
  __device__ __forceinline__ bool is_new() const { return position == 0; }
};

// Returns a sum of the squares of q or k, added up as the last warp of gated_delta.cu does.
__device__ __forceinline__ float total_of(const float* squares) {
  const float4 s = *reinterpret_cast<const float4*>(squares);
  return (s.x + s.z) + (s.y + s.w);
}

__device__ __forceinline__ void write_output(const ActRows& out, int64_t at, float y) {
  if (out.dtype == DType::kF32)
    static_cast<float*>(out.data)[at] = y;
  else
    static_cast<bf16*>(out.data)[at].bits = __bfloat16_as_ushort(__float2bfloat16_rn(y));
}

}  // namespace fp4moe::cuda
