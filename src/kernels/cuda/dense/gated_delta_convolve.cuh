// The convolution over time and the SiLU of a chunk's q, k and v, in the registers of a warp. Device code
// only.
//
// A part of a key head's channels is its q, its k or the v of one of its value heads: kDeltaDim channels. A
// warp has 8 rows of a part at once, a piece, and a lane 4 channels of them: whole rows are read with vectors
// of 16 bytes, and all inputs of a piece are in flight together.
#pragma once

#include "kernels/cuda/dense/gated_delta_chunks.cuh"

namespace fp4moe::cuda {

constexpr int kChunkWarps = 8, kChunkThreads = kChunkWarps * 32;
constexpr int kPieceRows = 8, kPieces = kDeltaChunk / kPieceRows;
static_assert(kPieces == kChunkWarps);

// The first channel of a part of the block's key head: 0 is q, 1 is k, and 2 + i is the v of the i-th of its
// `group` value heads.
__device__ __forceinline__ int64_t part_channel(const GatedDeltaArgs& a, int group, int part) {
  const int key_head = static_cast<int>(blockIdx.y);
  const int head =
      part < 2 ? part * a.num_key_heads + key_head : 2 * a.num_key_heads + key_head * group + part - 2;
  return int64_t{head} * kDeltaDim;
}

__device__ __forceinline__ int warp_index() {
  return static_cast<int>(__shfl_sync(~0u, threadIdx.x / 32, 0) % kChunkWarps);
}
// Read at each call, so that no addresses computed from it stay in registers from one phase to the next.
__device__ __forceinline__ int lane_index() {
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return static_cast<int>(lane % 32);
}

// x / (1 + exp(-x)), to about 2^-21 (1 + |x| / 4) of itself.
__device__ __forceinline__ float silu(float x) {
  constexpr float kLog2E = 1.44269504f;
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -kLog2E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + power));
  return x * inverse;
}

// Starts to load the taps of all parts, aligned to the last; those before the first are 0.
template <int kTaps>
__device__ __forceinline__ void load_taps(const GatedDeltaArgs& a, int group, float* taps) {
  const int width = a.conv_width;
  for (int i = static_cast<int>(threadIdx.x); i < (2 + group) * kTaps * kDeltaDim; i += kChunkThreads) {
    const int part = i / (kTaps * kDeltaDim), tap = i / kDeltaDim % kTaps - kTaps + width;
    const int64_t channel = part_channel(a, group, part) + i % kDeltaDim;
    ptx::cp_async4(ptx::shared_address(taps + i), a.conv_weight + channel * width + max(tap, 0),
                   tap >= 0 ? sizeof(float) : 0);
  }
  ptx::cp_async_commit();
}

// Fetches a part's rows into the L2.
__device__ __forceinline__ void prefetch_rows(const ChunkParams& p, const ChunkRows& c,
                                              int64_t first_channel) {
  constexpr int kLineFloats = 32, kLines = kDeltaDim / kLineFloats;
  for (int i = static_cast<int>(threadIdx.x); i < kDeltaChunk * kLines; i += kChunkThreads)
    if (c.has(i / kLines))
      ptx::prefetch_l2(p.args.qkv + c.batch_row(i / kLines) * p.args.qkv_stride + first_channel +
                       i % kLines * kLineFloats);
}

// A warp's rows of a part; a lane has four channels.
template <int kTaps>
struct PartRows {
  static constexpr int kBefore = kTaps - 1;
  // The inputs of the rows and those before; then the rows in x[0 ... kPieceRows - 1].
  float4 x[kBefore + kPieceRows];

  // first: row of the chunk; channel: this lane's first.
  __device__ __forceinline__ void load(const GatedDeltaArgs& a, const ChunkRows& c, int first,
                                       int64_t channel) {
    const int row = c.offset + first - kBefore;
    const float* const at = a.qkv + (c.first_row + row) * a.qkv_stride + channel;
    if (reinterpret_cast<uintptr_t>(a.qkv) % sizeof(float4) == 0 && a.qkv_stride % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kBefore + kPieceRows; ++i)
        x[i] = is_new(c, row + i) ? __ldcg(reinterpret_cast<const float4*>(at + i * a.qkv_stride)) : float4{};
    } else {
#pragma unroll
      for (int i = 0; i < kBefore + kPieceRows; ++i)
        x[i] = is_new(c, row + i) ? load_floats(at + i * a.qkv_stride, 1) : float4{};
    }
    if (row < 0 && !c.is_new) load_kept(a, c, row, channel);
  }

  // Convolves the rows. Those that the sequence does not have become 0.
  __device__ __forceinline__ void convolve(const ChunkRows& c, int first, const float* taps) {
    float4 w[kTaps];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) w[i] = *reinterpret_cast<const float4*>(taps + i * kDeltaDim);
#pragma unroll
    for (int r = 0; r < kPieceRows; ++r) {
      float4 sum = {};
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        const float4 v = x[r + i];
        sum = {fmaf(w[i].x, v.x, sum.x), fmaf(w[i].y, v.y, sum.y), fmaf(w[i].z, v.z, sum.z),
               fmaf(w[i].w, v.w, sum.w)};
      }
      x[r] = c.has(first + r) ? float4{silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w)} : float4{};
    }
  }

 private:
  __device__ static __forceinline__ bool is_new(const ChunkRows& c, int row) {
    return static_cast<unsigned>(row) < static_cast<unsigned>(c.num_rows);
  }
  __device__ static __forceinline__ float4 load_floats(const float* at, int64_t stride) {
    return {__ldcg(at), __ldcg(at + stride), __ldcg(at + 2 * stride), __ldcg(at + 3 * stride)};
  }
  // Loads the inputs before the sequence's new rows from the slot.
  __device__ __forceinline__ void load_kept(const GatedDeltaArgs& a, const ChunkRows& c, int row,
                                            int64_t channel) {
    const int kept = a.conv_width - 1;
#pragma unroll
    for (int i = 0; i < kBefore + kPieceRows; ++i)
      if (row + i < 0 && row + i >= -kept)
        x[i] = load_floats(a.conv(c.slot) + (channel + 1) * kept + row + i, kept);
  }
};

}  // namespace fp4moe::cuda
