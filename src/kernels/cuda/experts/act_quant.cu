// Computes  rows of activations as NVFP4 values (see kernels/device_act_quant.h); for FP8: act_quant_fp8.cu.
// Shapes    x [T, K] bf16 or f32 -> bf16 [rows, K].
// Bytes     2 or 4 read per element (twice with one scale per token, the second time from L1), 2 written.
// Bound     memory. One block per row; a thread processes 16 elements at a time.
// Launch    a programmatic dependent (launch.h).
// Numerics  bit-identical to formats/, whose functions it uses: IEEE division, no contraction.
#include <cuda_runtime.h>

#include <algorithm>

#include "base/check.h"
#include "formats/e2m1.h"
#include "kernels/cuda/experts/act_quant_fp8.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/nvfp4_block.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/device_act_quant.h"

namespace fp4moe {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kPiece = 16;  // elements that a thread handles at a time: an NVFP4 block

// The source row of x that a thread block processes, and its expert.
struct RowIds {
  int64_t source = -1;  // -1: nothing to do
  int64_t expert = 0;
};

// Returns the expert whose packed rows contain `row`: the number of experts, without the first, that start at
// or before it. Called by a whole warp.
__device__ int64_t expert_of(const DeviceRows& rows, int64_t num_experts, int64_t row) {
  int before = 0;
  for (int64_t e = 1 + threadIdx.x % 32; e < num_experts; e += 32) before += rows.offsets[e] <= row;
  return __reduce_add_sync(~0u, before);
}

// Returns the source of row `row` of out. Called by whole warps.
__device__ RowIds find_row(const DeviceActQuantArgs& a, int64_t row) {
  if (a.rows.counts == nullptr) return {row, 0};
  if (a.rows.capacity > 0) {
    const int64_t expert = row / a.rows.capacity;
    return {row % a.rows.capacity < a.rows.counts[expert] ? row : -1, expert};
  }
  if (row >= a.rows.offsets[a.num_experts]) return {};
  return {a.gather ? a.rows.slot_of_row[row] / a.topk : row, expert_of(a.rows, a.num_experts, row)};
}

__device__ void load_piece(const ActRows& x, int64_t i, float (&v)[kPiece]) {
  if (x.dtype == DType::kF32) {
    const auto* p = reinterpret_cast<const float4*>(static_cast<const float*>(x.data) + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 f = p[j];
      v[4 * j] = f.x, v[4 * j + 1] = f.y, v[4 * j + 2] = f.z, v[4 * j + 3] = f.w;
    }
    return;
  }
  const auto* p = reinterpret_cast<const uint4*>(static_cast<const bf16*>(x.data) + i);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint4 u = p[j];
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[8 * j + 2 * k] = __uint_as_float(words[k] << 16);
      v[8 * j + 2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
  }
}

// Returns max |x|; NaN elements are ignored.
__device__ float piece_amax(const float (&v)[kPiece]) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) most = fmaxf(most, fabsf(v[i]));
  return most;
}

// Returns, to every thread, the maximum over the block's threads.
__device__ float block_max(float most) {
  __shared__ float warps[kMaxThreads / 32];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  most = warps[0];
  for (int i = 1; i < blockDim.x / 32; ++i) most = fmaxf(most, warps[i]);
  return most;
}

// Returns max |x| of row `source`; v holds the thread's first piece.
__device__ float row_amax(const ActRows& x, int64_t source, float (&v)[kPiece]) {
  const int64_t first = threadIdx.x * kPiece;
  float most = piece_amax(v);
  for (int64_t c = first + blockDim.x * kPiece; c < x.cols; c += blockDim.x * kPiece) {
    float more[kPiece];
    load_piece(x, source * x.cols + c, more);
    most = fmaxf(most, piece_amax(more));
  }
  return block_max(most);
}

// Stores 16 elements as code * block scale (formats/nvfp4.h). encode is the tensor scale, decode its
// reciprocal.
__device__ void store_nvfp4(const float (&v)[kPiece], float encode, float decode, bf16* out) {
  const cuda::Nvfp4BlockScale scale = cuda::nvfp4_block_scale(piece_amax(v), encode, decode);
  uint32_t words[kPiece / 2];
#pragma unroll
  for (int i = 0; i < kPiece; i += 2) {
    const float low = e2m1_decode(e2m1_encode(__fmul_rn(v[i], scale.multiplier))) * scale.value;
    const float high = e2m1_decode(e2m1_encode(__fmul_rn(v[i + 1], scale.multiplier))) * scale.value;
    words[i / 2] = __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
  }
  auto* to = reinterpret_cast<uint4*>(out);
  to[0] = make_uint4(words[0], words[1], words[2], words[3]);
  to[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

__global__ void __launch_bounds__(kMaxThreads) act_quant_nvfp4(const DeviceActQuantArgs a) {
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  const int64_t row = blockIdx.x;
  const RowIds ids = find_row(a, row);
  if (ids.source < 0) return;
  float v[kPiece] = {};
  const int64_t first = threadIdx.x * kPiece;
  if (first < a.x.cols) load_piece(a.x, ids.source * a.x.cols + first, v);
  float encode, decode;
  if (a.kind == DeviceActQuantKind::kNvfp4PerToken) {
    const float amax = row_amax(a.x, ids.source, v);
    encode = cuda::nvfp4_row_encode_scale(amax);
    decode = __fdiv_rn(1.0f, encode);
    if (threadIdx.x == 0) a.row_scales[row] = amax == 0 ? 0 : decode;
  } else {
    encode = a.scales[a.per_expert ? ids.expert : 0];
    decode = __fdiv_rn(1.0f, encode);
  }
  for (int64_t c = first; c < a.x.cols; c += blockDim.x * kPiece) {
    if (c > first) load_piece(a.x, ids.source * a.x.cols + c, v);
    store_nvfp4(v, encode, decode, static_cast<bf16*>(a.out.data) + row * a.x.cols + c);
  }
}

}  // namespace

void cuda_quantize_act(const DeviceActQuantArgs& a) {
  FP4MOE_CHECK(a.x.cols % kPiece == 0, "activation cols must be a multiple of 16");
  if (a.x.cols == 0) return;
  if (a.kind == DeviceActQuantKind::kFp8PerToken) return quantize_act_fp8(a);
  const int64_t rows = a.rows.counts == nullptr ? a.x.rows : a.rows.max_rows;
  const auto threads =
      static_cast<unsigned>(std::min<int64_t>(kMaxThreads, (a.x.cols / kPiece + 31) / 32 * 32));
  launch("act_quant_nvfp4", act_quant_nvfp4, {static_cast<unsigned>(rows), threads}, a);
}

}  // namespace fp4moe
