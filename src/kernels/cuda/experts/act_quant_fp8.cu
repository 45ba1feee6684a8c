// Computes  rows of activations as FP8 codes in slabs, and their scales: kFp8PerToken of
//           kernels/device_act_quant.h.
// Shapes    x [T, K] bf16 or f32 -> slabs of 128 columns (fp8_tile_layout.h), [slab rows] f32 scales.
// Bytes     2 or 4 read per element (a second time, from L2, past 3072 columns of bf16 or 1536 of f32), 1
//           written; a token with several experts is quantised once and written topk times.
// Bound     memory. One warp per row; a lane takes every 32nd piece of 16 elements.
// Launch    a programmatic dependent (launch.h).
// Numerics  bit-identical to fp8_quantize_token() of formats/fp8.h.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/experts/act_quant_fp8.h"
#include "kernels/cuda/experts/fp8_tokens.cuh"
#include "kernels/cuda/experts/work_list.cuh"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_e4m3.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kPiece = 16;  // elements: 16 bytes of a slab
template <class T>
constexpr int kHeld = 12 / sizeof(T);  // pieces of a row that a lane keeps

// Four elements as stored in memory.
template <class T>
struct Four;
template <>
struct Four<bf16> {
  uint2 v = {0, 0};
  __device__ void unpack(float* to) const {
    to[0] = __uint_as_float(v.x << 16), to[1] = __uint_as_float(v.x & 0xffff0000u);
    to[2] = __uint_as_float(v.y << 16), to[3] = __uint_as_float(v.y & 0xffff0000u);
  }
};
template <>
struct Four<float> {
  float4 v = {0, 0, 0, 0};
  __device__ void unpack(float* to) const { to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w; }
};

// The elements that 16-byte piece `piece` of a row in slabs encodes; zeros past the row's end.
template <class T>
struct Piece {
  Four<T> fours[4];

  __device__ void load(const T* row, int cols, int piece) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int column = piece / 8 * static_cast<int>(kFp8TileCols) + 32 * q + piece % 8 * 4;
      fours[q] = {};
      if (column < cols) fours[q] = *reinterpret_cast<const Four<T>*>(row + column);
    }
  }
  __device__ void unpack(float (&v)[kPiece]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) fours[q].unpack(v + 4 * q);
  }
  // Returns max |x|; NaN elements are ignored.
  __device__ float amax() const {
    float v[kPiece], most = 0;
    unpack(v);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) most = fmaxf(most, fabsf(v[i]));
    return most;
  }
};

__device__ uint4 fp8_codes(const float (&v)[kPiece], float inverse) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = ptx::e4m3_word(v[4 * i] * inverse, v[4 * i + 1] * inverse, v[4 * i + 2] * inverse,
                              v[4 * i + 3] * inverse);
  return {words[0], words[1], words[2], words[3]};
}

// Returns the slab row of copy `place` of row `row` (its only copy, or one of a token's topk copies), or -1.
__device__ int64_t slab_row_of(const DeviceActQuantArgs& a, const int* offsets, int64_t row, int place) {
  const DeviceRows& rows = a.rows;
  if (rows.counts == nullptr) return row;
  if (rows.capacity > 0) {
    const int64_t expert = row / rows.capacity, within = row % rows.capacity;
    return within < rows.counts[expert] ? slab_first_row(expert, 0, rows.capacity) + within : -1;
  }
  const int num_experts = static_cast<int>(a.num_experts);
  const int packed = a.gather ? rows.row_of_slot[row * a.topk + place] : static_cast<int>(row);
  if (packed < 0 || packed >= offsets[num_experts]) return -1;
  const int expert = expert_at(offsets, num_experts, packed);
  return slab_first_row(expert, offsets[expert], 0) + packed - offsets[expert];
}

// Quantises a row and stores it in up to 32 slab rows. slab_row: in lane i the i-th one, or -1.
template <class T>
__device__ void quantize_row(const DeviceActQuantArgs& a, const T* row, int64_t slab_row) {
  const uint32_t wanted = __ballot_sync(~0u, slab_row >= 0);
  if (wanted == 0) return;
  const int lane = threadIdx.x % 32, cols = static_cast<int>(a.x.cols);
  const int pieces = static_cast<int>(num_slabs(cols)) * 8;
  Piece<T> held[kHeld<T>];
  float most = 0;
#pragma unroll
  for (int i = 0; i < kHeld<T>; ++i) held[i].load(row, cols, lane + 32 * i);
#pragma unroll
  for (int i = 0; i < kHeld<T>; ++i) most = fmaxf(most, held[i].amax());
  for (int piece = lane + 32 * kHeld<T>; piece < pieces; piece += 32) {
    Piece<T> more;
    more.load(row, cols, piece);
    most = fmaxf(most, more.amax());
  }
  most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
  const Fp8Scale scale(most);
  if (slab_row >= 0) a.row_scales[slab_row] = scale.scale;

  const auto store = [&](const Piece<T>& p, int piece) {
    float v[kPiece];
    p.unpack(v);
    const uint4 codes = fp8_codes(v, scale.inverse);
    for (uint32_t left = wanted; left != 0; left &= left - 1) {
      const int64_t to = __shfl_sync(~0u, slab_row, __ffs(static_cast<int>(left)) - 1);
      if (piece < pieces)
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(a.out.data) +
                                  slab_piece_offset(a.out.rows, to, piece)) = codes;
    }
  };
#pragma unroll
  for (int i = 0; i < kHeld<T>; ++i)
    if (32 * i < pieces) store(held[i], lane + 32 * i);
#pragma unroll 1
  for (int first = 32 * kHeld<T>; first < pieces; first += 32) {
    Piece<T> more;
    more.load(row, cols, first + lane);
    store(more, first + lane);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 3) act_quant_fp8(const DeviceActQuantArgs a) {
  extern __shared__ int offsets[];  // [L + 1]: offsets of packed rows
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  if (a.rows.counts != nullptr && a.rows.capacity == 0) {
    for (int e = threadIdx.x; e <= a.num_experts; e += kThreads) offsets[e] = a.rows.offsets[e];
    __syncthreads();
  }
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const bool by_token = a.rows.counts == nullptr || a.gather;
  if (row >= (by_token ? a.x.rows : a.rows.max_rows)) return;
  const T* x = static_cast<const T*>(a.x.data) + row * a.x.cols;
  const int places = a.gather ? static_cast<int>(a.topk) : 1, lane = threadIdx.x % 32;
  for (int first = 0; first < places; first += 32)
    quantize_row(a, x, first + lane < places ? slab_row_of(a, offsets, row, first + lane) : -1);
}

}  // namespace

void quantize_act_fp8(const DeviceActQuantArgs& a) {
  const int64_t rows = a.rows.counts == nullptr || a.gather ? a.x.rows : a.rows.max_rows;
  const LaunchShape shape = {static_cast<unsigned>(ceil_div(rows, kWarps)), kThreads,
                             static_cast<size_t>(a.num_experts + 1) * sizeof(int)};
  launch("act_quant_fp8", a.x.dtype == DType::kF32 ? act_quant_fp8<float> : act_quant_fp8<bf16>, shape, a);
}

}  // namespace fp4moe
