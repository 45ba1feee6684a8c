// The epilogue of the expert GEMMs (sm90_expert_gemm.cu): scales, bias, activation, stores. Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/experts/sm90_expert_work.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"

namespace fp4moe::sm90 {

// Parameters of the activation; silu is swiglu with alpha 1, beta 0 and no limit.
struct SwigluShape {
  float alpha, beta, limit;
};
__device__ __forceinline__ SwigluShape swiglu_shape(const Activation& a) {
  if (a.kind == ActivationKind::kSilu) return {1, 0, __int_as_float(0x7f800000)};
  return {a.alpha, a.beta, a.limit};
}

// Returns 1 / (1 + exp(-x)) with a relative error of 1e-6: the part of x log2(e) that f32 rounds off is added
// back, because otherwise ex2's relative error would grow with |x|. Returns 0 if x is below -85.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
  const float t = x < -85 ? 85 : -x;  // NaN stays NaN
  const float high = t * kLog2e, low = fmaf(t, kLog2e, -high);
  float e;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(high));
  const float inverse = __fdividef(1.0f, 1.0f + fmaf(e * low, kLn2, e));
  return x < -85 ? 0 : inverse;
}

__device__ __forceinline__ float swiglu(const SwigluShape& shape, float gate, float up) {
  const float g = gate > shape.limit ? shape.limit : gate;
  const float u = up > shape.limit ? shape.limit : up < -shape.limit ? -shape.limit : up;
  return g * sigmoid(shape.alpha * g) * (u + shape.beta);
}

// Copies a warpgroup's sums for tokens 16 * part ... 16 * part + 15 to shared memory, [token][row]. d: the
// sums, as wgmma leaves them.
template <class C, int kSums>
__device__ __forceinline__ void put_sums(int part, const float (&d)[kSums], float* out) {
  const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  float* to = out + 2 * q * C::kOutPitch + warp * 16 + g;
#pragma unroll
  for (int p = 0; p < (kSums + 7) / 8; ++p) {
    if (p != part) continue;
#pragma unroll
    for (int i = 0; i < 8 && 8 * p + i < kSums; ++i)
      to[(i / 4 * 8 + i % 2) * C::kOutPitch + i % 4 / 2 * 8] = d[8 * p + i];
  }
}

// The place in `out` of a thread's eight sums of a part: the token is thread / 8, and thread % 8 gives the
// columns.
struct PartOut {
  int row;        // row of out
  int column;     // first of four (gated) or eight columns
  int slot = -1;  // of the row, if it returns to its token's rank
};

__device__ __forceinline__ float row_scale(const GemmArgs& args, const GemmPhase& phase, int row) {
  if (phase.b_row_scales == nullptr) return 1;
  return phase.b_row_scales[phase.gather ? args.rows.slot_of_row[row] / args.topk : row];
}

// w4a8: multiplies the eight sums of tile rows first ... first + 3 and second ... second + 3 by the row
// factors of their weights.
__device__ __forceinline__ void multiply_factors(const float* factors, int first, int second, float (&v)[8]) {
  const float4 low = *reinterpret_cast<const float4*>(factors + first);
  const float4 high = *reinterpret_cast<const float4*>(factors + second);
  v[0] *= low.x, v[1] *= low.y, v[2] *= low.z, v[3] *= low.w;
  v[4] *= high.x, v[5] *= high.y, v[6] *= high.z, v[7] *= high.w;
}

// The scales of a thread's sums of a tile, and the bias that is added to their products.
struct TileScales {
  float low, high;
  float4 bias[2] = {};

  // column: of PartOut.
  __device__ __forceinline__ TileScales(const GemmArgs& args, const GemmPhase& phase, int expert,
                                        int column) {
    const bool gated = phase.epilogue == Epilogue::kGated;
    const float* scales = args.scales + 3 * expert;
    low = scales[gated ? 0 : phase.epilogue == Epilogue::kRelu2 ? 1 : 2];
    high = gated ? scales[1] : low;
    if (phase.bias == nullptr || column >= phase.cols) return;
    const float* b = phase.bias + int64_t{expert} * (gated ? 2 * phase.cols : phase.cols) + column;
    bias[0] = *reinterpret_cast<const float4*>(b);
    bias[1] = *reinterpret_cast<const float4*>(b + (gated ? phase.cols : 4));
  }
};

// Replaces the sums in v with results. Gated: v holds the sums of four gates, then of their ups, and the
// results are v[0 ... 3]. Otherwise, the results are all of v.
__device__ __forceinline__ void finish(const Activation& activation, Epilogue epilogue,
                                       const TileScales& scales, float row_scale, float (&v)[8]) {
  const float low = scales.low * row_scale, high = scales.high * row_scale;
  const float4 &first = scales.bias[0], &second = scales.bias[1];
  const float b[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = fmaf(v[i], i < 4 ? low : high, b[i]);
  if (epilogue == Epilogue::kGated) {
    const SwigluShape shape = swiglu_shape(activation);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = swiglu(shape, v[i], v[4 + i]);
  } else if (epilogue == Epilogue::kRelu2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = v[i] < 0 ? 0 : v[i] * v[i];
  }
}

// Returns the place of a row that returns to its token's rank.
__device__ __forceinline__ bf16* returned_place(const GemmArgs& args, int cols, const PartOut& at) {
  const A2aSlotPlaces& places = args.returns;
  const int rank = __float2int_rd((static_cast<float>(at.slot) + 0.5f) * places.inverse_slots);
  return places.of_rank[rank] + int64_t{at.slot - rank * places.num_slots} * cols + at.column;
}

template <bool kReturns>
__device__ __forceinline__ void store(const GemmArgs& args, const GemmPhase& phase, const PartOut& at,
                                      const float (&v)[8]) {
  const bool gated = phase.epilogue == Epilogue::kGated;
  const int64_t i = int64_t{at.row} * phase.cols + at.column;
  if (phase.out_is_f32) {
    auto* out = reinterpret_cast<float4*>(static_cast<float*>(phase.out) + i);
    out[0] = {v[0], v[1], v[2], v[3]};
    if (!gated) out[1] = {v[4], v[5], v[6], v[7]};
    return;
  }
  bf16* out = static_cast<bf16*>(phase.out) + i;
  if constexpr (kReturns)
    if (at.slot >= 0) out = returned_place(args, phase.cols, at);
  const uint2 low = {ptx::bf16_pair(v[0], v[1]), ptx::bf16_pair(v[2], v[3])};
  if (gated)
    *reinterpret_cast<uint2*>(out) = low;
  else
    *reinterpret_cast<uint4*>(out) = {low.x, low.y, ptx::bf16_pair(v[4], v[5]), ptx::bf16_pair(v[6], v[7])};
}

// Finishes one warpgroup's sums of the item's weight tile `tile_in_item`, 16 tokens at a time, through shared
// memory: the loop is small enough for the instruction cache, and the stores write whole sectors.
template <class C, int kSums>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, GemmShared<C>& shared, const WorkItem& item,
                                            int tile_in_item, const ItemScales<C>& scales,
                                            const float (&d)[kSums]) {
  const int barrier = 1 + threadIdx.x / 128;
  float* out = shared.out[threadIdx.x / 128];
  const GemmPhase& phase = args.phases[item.phase];
  const int thread = threadIdx.x % 128, token = thread / 8, eighth = thread % 8;
  const bool gated = phase.epilogue == Epilogue::kGated;
  const int tile = item.first_tile + tile_in_item;
  // Gated: rows 16 w + 0 ... 7 are gates and the next eight are their ups; an eighth has half of them.
  const int first = gated ? eighth / 2 * 16 + eighth % 2 * 4 : eighth * 8, second = first + (gated ? 8 : 4);
  PartOut at;
  at.column = gated ? tile * 32 + eighth * 4 : tile * 64 + eighth * 8;
  // Requested before the barriers, because they often come from HBM.
  const TileScales tile_scales(args, phase, item.expert, at.column);
#pragma unroll 1
  for (int part = 0; part * C::kOutTokens < item.count; ++part) {
    const int in_item = part * C::kOutTokens + token;
    at.row = item.first_row + in_item;
    if constexpr (C::kReturns)  // loaded while the sums are on their way through shared memory
      if (phase.epilogue == Epilogue::kDown)
        at.slot = in_item < item.count ? args.rows.slot_of_row[at.row] : 0;
    ptx::named_barrier(barrier, 128);  // the previous part has been read
    put_sums<C>(part, d, out);
    ptx::named_barrier(barrier, 128);
    if (in_item >= item.count || at.column >= phase.cols) continue;
    const float token_scale = C::kFp8 ? scales.tokens[in_item] : row_scale(args, phase, at.row);
    const float4 low = *reinterpret_cast<const float4*>(out + token * C::kOutPitch + first);
    const float4 high = *reinterpret_cast<const float4*>(out + token * C::kOutPitch + second);
    float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if constexpr (C::kFp8) multiply_factors(scales.rows + tile_in_item * 64, first, second, v);
    finish(args.activation, phase.epilogue, tile_scales, token_scale, v);
    store<C::kReturns>(args, phase, at, v);
  }
}

}  // namespace fp4moe::sm90
