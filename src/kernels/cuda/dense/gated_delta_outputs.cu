// gated_delta in chunks, third kernel: norm and gate of the outputs.
//
// Computes:  per row and value head, with o from the second kernel in the place of V,
//              out = o / sqrt(mean(o^2) + eps) * norm_weight * silu(z)
//            A block has a chunk of a head. It turns o around in shared memory, because a lane of the second
//            kernel has two rows of a column; then a warp norms and gates a row at a time.
// Shapes:    chunks of 64 rows; dv = 128.
// Bytes:     8 Hv dv read per row (o and z), and 4 Hv dv (f32) or 2 Hv dv (bf16) written.
// Flops:     about 20 Hv dv per row.
// Bound:     HBM: all of a thread's loads, 256 bytes, are in flight at once.
// Numerics:  f32. The order of a row's sum of squares depends on nothing else.
#include <cuda_bf16.h>

#include "formats/bf16.h"
#include "kernels/cuda/dense/gated_delta_chunks.cuh"
#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWarpRows = kDeltaChunk / kWarps, kLaneColumns = kDeltaDim / 32;
constexpr int kStride = kDeltaDim + 4;  // floats of a row; pads against bank conflicts
static_assert(kWarps == kDeltaTiles);

__device__ __forceinline__ void store_output(const ActRows& out, int64_t at, float y) {
  if (out.dtype == DType::kF32)
    static_cast<float*>(out.data)[at] = y;
  else
    static_cast<bf16*>(out.data)[at].bits = __bfloat16_as_ushort(__float2bfloat16_rn(y));
}

// z of the warp's rows kWarps * i + warp; a lane has the columns lane + 32 j. z need not be aligned.
struct GateRows {
  float z[kWarpRows][kLaneColumns];

  __device__ __forceinline__ void load(const ChunkParams& p, const ChunkRows& c, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int row = kWarps * i + warp;
      const float* const at =
          p.args.z + c.batch_row(row) * p.args.z_stride + int64_t{blockIdx.y} * kDeltaDim + lane;
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) z[i][j] = c.has(row) ? __ldcg(at + 32 * j) : 0;
    }
  }
};

// Writes tile `warp` of o to rows [kDeltaChunk, kStride].
__device__ __forceinline__ void turn_tile(const float4 (&o)[kDeltaChunk / 8], float* rows, int warp,
                                          int lane) {
  float* const to = rows + lane % 4 * 2 * kStride + warp * kDeltaTileCols + lane / 4;
#pragma unroll
  for (int j = 0; j < kDeltaChunk / 8; ++j) {
    float* const at = to + j * 8 * kStride;
    at[0] = o[j].x, at[kStride] = o[j].y, at[8] = o[j].z, at[kStride + 8] = o[j].w;
  }
}

// Grid (chunks of the pass, Hv).
__global__ void __launch_bounds__(kThreads) chunk_outputs_kernel(const __grid_constant__ ChunkParams p) {
  __shared__ float rows[kDeltaChunk * kStride];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  ptx::grid_dependents_launch();
  wait_at_start(p);
  const int chunk = p.first_chunk + static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const float4* const values =
      &p.values[int64_t{blockIdx.x} * p.args.num_value_heads + head].of[warp][0][lane];
  float4 o[kDeltaChunk / 8];
#pragma unroll
  for (int j = 0; j < kDeltaChunk / 8; ++j) o[j] = __ldcg(values + j * 32);
  const ChunkedSequence sequence = find_sequence(p, chunk, 0);
  if (sequence.index < 0) return wait_at_end(p);  // the whole block
  const ChunkRows c = chunk_rows(sequence, chunk);
  GateRows gates;
  gates.load(p, c, warp, lane);
  float weights[kLaneColumns];
#pragma unroll
  for (int j = 0; j < kLaneColumns; ++j) weights[j] = __ldg(p.args.norm_weight + lane + 32 * j);
  turn_tile(o, rows, warp, lane);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    const int row = kWarps * i + warp;
    if (!c.has(row)) continue;
    float x[kLaneColumns], sum = 0;
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      x[j] = rows[row * kStride + lane + 32 * j];
      sum += x[j] * x[j];
    }
    const float inverse = inverse_rms(warp_sum(sum), kDeltaDim, p.args.eps);
    const int64_t at = c.batch_row(row) * p.args.out.cols + int64_t{head} * kDeltaDim + lane;
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      const float z = gates.z[i][j];
      store_output(p.args.out, at + 32 * j, x[j] * inverse * weights[j] * (z / (1 + expf(-z))));
    }
  }
  wait_at_end(p);
}

}  // namespace

void launch_chunk_outputs(const ChunkParams& params) {
  launch("chunk_outputs", chunk_outputs_kernel,
         {.grid = dim3(static_cast<unsigned>(params.num_chunks),
                       static_cast<unsigned>(params.args.num_value_heads)),
          .block = dim3(kThreads)},
         params);
}

}  // namespace fp4moe::cuda
