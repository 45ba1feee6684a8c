// gated_delta in chunks, third kernel: norm and gate of the outputs.
//
// Computes:  per row and value head, with o from the second kernel in the place of V,
//              out = o / sqrt(mean(o^2) + eps) * norm_weight * silu(z)
//            A block has a chunk of a head. It turns o around in shared memory, because a lane of the second
//            kernel has two rows of a column; then a warp norms and gates a row at a time.
// Shapes:    chunks of 64 rows; dv = 128.
// Bytes:     8 Hv dv read per row (o and z), and 4 Hv dv (f32) or 2 Hv dv (bf16) written.
// Flops:     about 20 Hv dv per row.
// Bound:     HBM: all of a thread's loads, 256 bytes in vectors of 16, are in flight at once.
// Numerics:  f32; silu to about 2^-21 (gated_delta_convolve.cuh). The order of a row's sum of squares depends
// on nothing else.
#include "kernels/cuda/dense/gated_delta_convolve.cuh"
#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWarpRows = kDeltaChunk / kWarps;
constexpr int kStride = kDeltaDim + 4;  // floats of a row; pads against bank conflicts
static_assert(kWarps == kDeltaTiles && kDeltaDim == 32 * 4);

__device__ __forceinline__ bool is_aligned(const void* at, size_t bytes) {
  return reinterpret_cast<uintptr_t>(at) % bytes == 0;
}

// Stores 4 elements; at: a multiple of 4.
__device__ __forceinline__ void store_outputs(const ActRows& out, int64_t at, const float4& y) {
  if (out.dtype == DType::kF32) {
    float* const to = static_cast<float*>(out.data) + at;
    if (is_aligned(to, sizeof(float4)))
      *reinterpret_cast<float4*>(to) = y;
    else
      to[0] = y.x, to[1] = y.y, to[2] = y.z, to[3] = y.w;
  } else {
    const uint2 pairs = bf16_words(y);
    auto* const to = static_cast<uint16_t*>(out.data) + at;
    if (is_aligned(to, sizeof(uint2))) {
      *reinterpret_cast<uint2*>(to) = pairs;
    } else {
      to[0] = static_cast<uint16_t>(pairs.x), to[1] = static_cast<uint16_t>(pairs.x >> 16);
      to[2] = static_cast<uint16_t>(pairs.y), to[3] = static_cast<uint16_t>(pairs.y >> 16);
    }
  }
}

// z of the warp's rows kWarps * i + warp; a lane has 4 columns. z need not be aligned.
struct GateRows {
  float4 z[kWarpRows];

  __device__ __forceinline__ void load(const ChunkParams& p, const ChunkRows& c, int warp, int lane) {
    const int64_t stride = p.args.z_stride;
    const float* const at =
        p.args.z + c.batch_row(warp) * stride + int64_t{blockIdx.y} * kDeltaDim + lane * 4;
    if (is_aligned(p.args.z, sizeof(float4)) && stride % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i)
        z[i] = c.has(kWarps * i + warp) ? __ldcg(reinterpret_cast<const float4*>(at + kWarps * i * stride))
                                        : float4{};
    } else {
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const float* const row = at + kWarps * i * stride;
        z[i] = c.has(kWarps * i + warp)
                   ? float4{__ldcg(row), __ldcg(row + 1), __ldcg(row + 2), __ldcg(row + 3)}
                   : float4{};
      }
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
  __shared__ alignas(16) float rows[kDeltaChunk * kStride];
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
  const float* const weights = p.args.norm_weight + lane * 4;
  const float4 w = {__ldg(weights), __ldg(weights + 1), __ldg(weights + 2), __ldg(weights + 3)};
  turn_tile(o, rows, warp, lane);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    const int row = kWarps * i + warp;
    const float4 x = *reinterpret_cast<const float4*>(rows + row * kStride + lane * 4), z = gates.z[i];
    const float inverse = inverse_rms(warp_sum(sum_of_squares(0, x)), kDeltaDim, p.args.eps);
    if (!c.has(row)) continue;
    store_outputs(p.args.out, c.batch_row(row) * p.args.out.cols + int64_t{head} * kDeltaDim + lane * 4,
                  {x.x * inverse * w.x * silu(z.x), x.y * inverse * w.y * silu(z.y),
                   x.z * inverse * w.z * silu(z.z), x.w * inverse * w.w * silu(z.w)});
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
