// ExpertBatch: the only type passed between transports (a2a) and runners.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace fp4moe {

enum class BatchLayout : uint8_t {
  kPacked = 1,  // no gaps between experts: expert e has rows [offsets[e], offsets[e + 1])
  kMasked = 2,  // [L, capacity, H]: expert e has rows [e * capacity, e * capacity + counts[e])
};

// Where the experts' outputs are multiplied by the router's weights.
enum class CombineContract : uint8_t {
  // One row per (token, slot) is returned; the source weights and sums them in top-k order.
  kWeightsAtSource = 1,
  // Each rank returns one weighted sum per token; the source adds the ranks' sums.
  kPartialSums = 2,
};

// Token rows grouped by local expert. Does not own its memory, which is in the forward pass's arena or in the
// heap.
struct ExpertBatch {
  BatchLayout layout = BatchLayout::kPacked;
  CombineContract combine = CombineContract::kWeightsAtSource;
  int64_t num_experts = 0;           // L
  const int64_t* offsets = nullptr;  // [L + 1], kPacked
  const int64_t* counts = nullptr;   // [L], kMasked
  int64_t capacity = 0;              // rows per expert, kMasked
  // kMasked: a hint for choosing tiles, (T * R * K + E) / E, where T is this rank's number of tokens in the
  // round: about the number of rows per expert if every rank has T tokens and routing is balanced.
  int64_t expected_m = 0;
  ActRows x;                            // [rows, H]; with kMasked, rows past the counts are undefined
  const float* x_row_scales = nullptr;  // [rows] or null: row r has the value x[r] * x_row_scales[r]
  // x already holds NVFP4 values (code * block scale), and x_row_scales their tensor scales: the layer's
  // scalar a1 if w4a4 uses one, else one per row. w4a4 does not quantise such rows again.
  bool x_is_nvfp4 = false;
  const int32_t* slot_of_row = nullptr;  // [rows], kPacked: the row's source slot, t * K + k
  const int32_t* row_of_slot =
      nullptr;         // [T * K], kPacked: the inverse; -1 if the slot's expert is not local
  float* y = nullptr;  // [rows, H] f32, written by the runner: with down bias, without router weights

  int64_t first_row(int64_t e) const { return layout == BatchLayout::kPacked ? offsets[e] : e * capacity; }
  int64_t num_rows(int64_t e) const {
    return layout == BatchLayout::kPacked ? offsets[e + 1] - offsets[e] : counts[e];
  }
};

// Groups T * K slots by local expert. The sort is stable: an expert's rows keep the order of their slots, so
// the result depends on the ids only. ids are global; ids outside [first_expert, first_expert + L), such as
// -1, are dropped (row_of_slot -1). If a token names an expert twice, the expert gets two rows.
struct ExpertSortArgs {
  const int32_t* ids = nullptr;  // [num_slots]
  int64_t num_slots = 0;         // T * K
  int64_t first_expert = 0, num_experts = 0;
  int64_t* offsets = nullptr;      // [L + 1] out
  int32_t* slot_of_row = nullptr;  // [num_slots] out; the first offsets[L] are written
  int32_t* row_of_slot = nullptr;  // [num_slots] out
};
void moe_sort(const ExpertSortArgs& args);

}  // namespace fp4moe
