// A bf16 shared expert (SharedSlot) in few_tokens.cu: its weights are read once, by all CTAs. Each CTA
// computes some columns of h and then some of the output. Device code only.
//
// Time goes down; === is a barrier of the CTA, ~~~ an exchange with the other CTAs:
//
//   before the wait          load the weights of a column pair or two of h
//   with the FP4 weights     multiply them with x: a column has the sums of kColumnWarps warps
//   === end of phase 0       load the weights of up to 16 output columns; add the sums, store h
//   ~~~ stage h  ===         multiply, store y: the rows after those of the FP4 experts
//
// Numerics: exact products, f32 sums: over a lane's columns in order, over the lanes by halving, and over a
// column's warps in order; h is rounded to bf16.
#pragma once

#include "kernels/cuda/experts/few_tokens_feed.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"

namespace fp4moe::few {

constexpr int kColumnWarps = 3, kColumns = kWarps / kColumnWarps;  // columns of h per CTA, at most
constexpr int kUpVectors = 3, kDownVectors = 2;                    // of 8 weights per lane and row, at most
constexpr int kMaxDenseH = kUpVectors * kColumnWarps * 32 * 8, kMaxDenseI = kDownVectors * 32 * 8;

// Follows Shared in memory.
struct DenseShared {
  float2 parts[kWarps][kFewMaxTokens];                    // a warp's sums for gate and up
  alignas(16) uint32_t h[kFewMaxTokens][kMaxDenseI / 2];  // pairs of bf16
};
__device__ __forceinline__ DenseShared& dense_of(Shared& s) {
  return *reinterpret_cast<DenseShared*>(reinterpret_cast<uint8_t*>(&s) + few_padded(sizeof(Shared)));
}

__device__ __forceinline__ float add_dot(const uint4& a, const uint4& b, float sum) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(ptx::low_of_pair(x[i]), ptx::low_of_pair(y[i]), sum);
    sum = fmaf(ptx::high_of_pair(x[i]), ptx::high_of_pair(y[i]), sum);
  }
  return sum;
}
__device__ __forceinline__ float lanes_sum(float sum) {
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

// This CTA's columns of h: whole pairs.
struct DenseColumns {
  int first, end;
  __device__ explicit DenseColumns(const Args& a) {
    const int pairs = static_cast<int>(a.moe.shared.intermediate_size) / 2, block = blockIdx.x;
    first = 2 * few_cut(pairs, block, a.plan.num_ctas);
    end = 2 * few_cut(pairs, block + 1, a.plan.num_ctas);
  }
};

// A warp's weights for a column of h.
struct DenseUp {
  uint4 gate[kUpVectors], up[kUpVectors];
  bool has_column;

  __device__ static int vector(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return (i * kColumnWarps + thread / 32 % kColumnWarps) * 32 + thread % 32;
  }
  __device__ void load(const Args& a) {
    const DenseColumns columns(a);
    const int column = columns.first + static_cast<int>(threadIdx.x) / 32 / kColumnWarps;
    has_column = threadIdx.x / 32 < kWarps && column < columns.end;
    const int vectors = static_cast<int>(a.moe.experts.hidden_size) / 8;
    const auto* of_gate =
        reinterpret_cast<const uint4*>(a.moe.shared.gate_up) + static_cast<int64_t>(column) * vectors;
    const auto* of_up = of_gate + a.moe.shared.intermediate_size * vectors;
#pragma unroll
    for (int i = 0; i < kUpVectors; ++i) {
      const bool exists = has_column && vector(i) < vectors;
      gate[i] = exists ? __ldcs(of_gate + vector(i)) : uint4{};
      up[i] = exists ? __ldcs(of_up + vector(i)) : uint4{};
    }
  }
  __device__ void multiply(const Args& a, DenseShared& s) const {
    if (!has_column) return;
    const int vectors = static_cast<int>(a.moe.experts.hidden_size) / 8;
    for (int t = 0; t < a.moe.num_tokens; ++t) {
      const auto* x = reinterpret_cast<const uint4*>(a.moe.x) + static_cast<int64_t>(t) * vectors;
      float2 sum = {0, 0};
#pragma unroll
      for (int i = 0; i < kUpVectors; ++i)
        if (vector(i) < vectors) {
          const uint4 v = x[vector(i)];
          sum.x = add_dot(gate[i], v, sum.x);
          sum.y = add_dot(up[i], v, sum.y);
        }
      sum.x = lanes_sum(sum.x), sum.y = lanes_sum(sum.y);
      if (threadIdx.x % 32 == 0) s.parts[threadIdx.x / 32][t] = sum;
    }
  }
};

// Row of token t of the shared expert in h and y.
__device__ __forceinline__ int dense_row(const Shared& s, int t) { return s.first_row[s.num_experts] + t; }

// Gives the shared expert's slots their rows. Called by the helper warp after find_rows().
__device__ inline void place_dense_rows(const Args& a, Shared& s) {
  const int t = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
  if (t < a.moe.num_tokens) s.row_of_slot[(t + 1) * a.token_slots - 1] = dense_row(s, t);
}

// Stores this CTA's columns of h. Called by all threads, after a barrier that follows DenseUp::multiply().
__device__ inline void put_dense_h(const Args& a, Shared& s, const DenseShared& dense) {
  const DenseColumns columns(a);
  const int pairs = (columns.end - columns.first) / 2;
  for (int i = threadIdx.x; i < pairs * static_cast<int>(a.moe.num_tokens); i += kThreads) {
    const int t = i / pairs, pair = i % pairs;
    float h[2];
    for (int j = 0; j < 2; ++j) {
      float2 sum = {0, 0};
      for (int part = 0; part < kColumnWarps; ++part) {
        const float2 of_warp = dense.parts[(2 * pair + j) * kColumnWarps + part][t];
        sum.x += of_warp.x, sum.y += of_warp.y;
      }
      h[j] = sum.x / (1 + expf(-sum.x)) * sum.y;
    }
    ptx::mbarrier_wait(&s.cleared, 0);
    store_word(a.h + static_cast<int64_t>(dense_row(s, t)) * h_words(a) + columns.first / 2 + pair,
               ptx::bf16_pair(h[0], h[1]));
  }
}

// Copies h to shared memory as it becomes valid. Called by all threads, the last first: stage_h() keeps the
// first ones busy.
__device__ inline void stage_dense_h(const Args& a, const Shared& s, DenseShared& dense) {
  const int quads = static_cast<int>(a.moe.shared.intermediate_size) / 4;
  for (int i = kThreads - 1 - static_cast<int>(threadIdx.x); i < quads * static_cast<int>(a.moe.num_tokens);
       i += kThreads) {
    const int t = i / quads, quad = i % quads;
    const Word* p = a.h + static_cast<int64_t>(dense_row(s, t)) * h_words(a) + 2 * quad;
    TwoWords w = load_words(p);
    while (!w.there()) w = load_words(p);
    dense.h[t][2 * quad] = static_cast<uint32_t>(w.a);
    dense.h[t][2 * quad + 1] = static_cast<uint32_t>(w.b);
  }
}

// A warp's weights for a column of the output.
struct DenseDown {
  uint4 weights[kDownVectors];
  int column;  // -1: none

  __device__ void load(const Args& a) {
    const auto h = static_cast<int>(a.moe.experts.hidden_size);
    const int block = blockIdx.x, lane = static_cast<int>(threadIdx.x) % 32;
    column = few_cut(h, block, a.plan.num_ctas) + static_cast<int>(threadIdx.x) / 32;
    if (column >= few_cut(h, block + 1, a.plan.num_ctas)) column = -1;
    const int vectors = static_cast<int>(a.moe.shared.intermediate_size) / 8;
    const auto* row =
        reinterpret_cast<const uint4*>(a.moe.shared.down) + static_cast<int64_t>(max(column, 0)) * vectors;
#pragma unroll
    for (int i = 0; i < kDownVectors; ++i)
      weights[i] = lane + 32 * i < vectors ? __ldcs(row + lane + 32 * i) : uint4{};
  }
  // Stores the column of y for all tokens. A barrier must separate it from stage_dense_h().
  __device__ void multiply(const Args& a, Shared& s, const DenseShared& dense) const {
    if (column < 0) return;
    const int vectors = static_cast<int>(a.moe.shared.intermediate_size) / 8,
              lane = static_cast<int>(threadIdx.x) % 32;
    ptx::mbarrier_wait(&s.cleared, 0);
    for (int t = 0; t < a.moe.num_tokens; ++t) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kDownVectors; ++i)
        if (const int v = lane + 32 * i; v < vectors)
          sum = add_dot(weights[i], *reinterpret_cast<const uint4*>(&dense.h[t][4 * v]), sum);
      sum = lanes_sum(sum);
      if (lane == 0)
        store_word(a.y + static_cast<int64_t>(dense_row(s, t)) * a.moe.experts.hidden_size + column,
                   __float_as_uint(sum));
    }
  }
};

}  // namespace fp4moe::few
