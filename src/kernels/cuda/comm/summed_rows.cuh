// Rows of partial sums, for the kernels that add those of all ranks and norm the result: their form on the
// links, and which thread has which elements of a row. Device code, and how to launch it.
#pragma once

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/comm/partials.cuh"
#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/slot_rows.cuh"
#include "kernels/device_moe.h"

namespace fp4moe::cuda {

constexpr int kNarrowThreads = 768;  // for narrow rows: two blocks fit on an SM
constexpr int kMaxVectors = kMaxNormedCols / (4 * kMaxNormThreads);  // of four elements, per thread

// Rows whose weighted sums are the partial sums: MoeCombineArgs.
struct ExpertRows {
  const bf16* y = nullptr;
  SlotRows slots{};
};

// Four elements as they are sent.
struct F32Words {
  using Words = uint4;
  static __device__ __forceinline__ Words of(const float4& v) {
    return sendable(
        uint4{__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)});
  }
  static __device__ __forceinline__ float4 values(const Words& w) {
    return {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
  }
};
struct Bf16Words {
  using Words = uint2;
  static __device__ __forceinline__ Words of(const float4& v) {
    const Words w = bf16_words(v);
    return {sendable(w.x), sendable(w.y)};
  }
  static __device__ __forceinline__ float4 values(const Words& w) {
    return {__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u), __uint_as_float(w.y << 16),
            __uint_as_float(w.y & 0xffff0000u)};
  }
};

// Which vectors of a row this thread has.
template <int kVectors>
struct RowThread {
  int index;    // among the threads that norm a row; at least `threads`: none
  int threads;  // of all blocks of the cluster
  int vectors;  // of a row

  // Calls f(j, i) for each vector i of a row that this thread has.
  template <class Function>
  __device__ __forceinline__ void for_vectors(const Function& f) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (const int i = index + j * threads; index < threads && i < vectors) f(j, i);
  }
};

// This thread's vectors of a row.
template <int kVectors>
struct RowPart {
  float4 v[kVectors];

  static __device__ __forceinline__ RowPart load(const float* row, const RowThread<kVectors>& thread) {
    RowPart part{};
    thread.for_vectors([&](int j, int i) { part.v[j] = __ldcg(reinterpret_cast<const float4*>(row) + i); });
    return part;
  }
  __device__ __forceinline__ void operator+=(const RowPart& other) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      v[j].x += other.v[j].x, v[j].y += other.v[j].y;
      v[j].z += other.v[j].z, v[j].w += other.v[j].w;
    }
  }
};

// Returns the weighted sum of a token's rows, with the bits of moe_combine.cu.
template <int kVectors>
__device__ __forceinline__ RowPart<kVectors> weighted_sum(const ExpertRows& experts, int64_t token,
                                                          int64_t cols, const RowThread<kVectors>& thread) {
  struct Bits {
    uint2 v[kVectors];
  };
  RowPart<kVectors> sum{};
  const auto load = [&](int64_t row) {
    const auto* const y = reinterpret_cast<const uint2*>(experts.y + row * cols);
    Bits bits{};
    thread.for_vectors([&](int j, int i) { bits.v[j] = __ldcg(y + i); });
    return bits;
  };
  experts.slots.for_slots(token, load, [&](float weight, const Bits& bits) {
    thread.for_vectors([&](int j, int) {
      const float4 y = Bf16Words::values(bits.v[j]);
      float4& s = sum.v[j];
      s = {fmaf(weight, y.x, s.x), fmaf(weight, y.y, s.y), fmaf(weight, y.z, s.z), fmaf(weight, y.w, s.w)};
    });
  });
  return sum;
}

// A rank's partial sums of rows.
struct PartialRows {
  const float* partial;  // [T, H]
  ExpertRows experts;    // instead of partial, if y is not null
  int64_t cols;

  template <int kVectors>
  __device__ __forceinline__ RowPart<kVectors> row(int64_t row, const RowThread<kVectors>& thread) const {
    if (experts.y != nullptr) return weighted_sum(experts, row, cols, thread);
    return RowPart<kVectors>::load(partial + row * cols, thread);
  }
};

// Returns the row that `peer` stores at `from`, and marks its words as unsent again.
template <class Format, int kVectors>
__device__ __forceinline__ RowPart<kVectors> take_row(const Operation& o, int peer,
                                                      typename Format::Words* from,
                                                      const RowThread<kVectors>& thread) {
  typename Format::Words words[kVectors];
  o.wait(peer, [&](uint32_t&) {
    thread.for_vectors([&](int j, int i) { words[j] = load_words(from + i); });
    bool all = true;
    thread.for_vectors([&](int j, int) { all &= has_arrived(words[j]); });
    return all;
  });
  RowPart<kVectors> part{};
  thread.for_vectors([&](int j, int i) {
    part.v[j] = Format::values(words[j]);
    mark_unsent(from + i);
  });
  return part;
}

// One of `partial` and `experts` is null.
inline PartialRows partial_rows(const float* partial, const MoeCombineArgs* experts, int64_t cols) {
  if (experts == nullptr) return {.partial = partial, .experts = {}, .cols = cols};
  FP4MOE_CHECK(experts->y_bf16 != nullptr && !experts->added.exist(), "only bf16 rows are summed here");
  return {
      .partial = nullptr,
      .experts = {experts->y_bf16, {experts->row_of_slot, experts->weights, static_cast<int>(experts->topk)}},
      .cols = cols};
}

// How many blocks can wait at once.
inline int64_t resident_blocks(const void* kernel, unsigned threads, int max_blocks) {
  if (!may_start_early()) return std::max(1, max_blocks / 2);
  int per_sm = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, static_cast<int>(threads), 0);
  return int64_t{std::max(per_sm, 1)} * device_limits().num_sms;
}

}  // namespace fp4moe::cuda
