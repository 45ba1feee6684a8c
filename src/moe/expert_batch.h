// ExpertBatch: the only type between transports (a2a) and runners.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace fp4moe {

enum class BatchLayout : uint8_t {
  kPacked = 1,  // expert after expert without gaps: rows [offsets[e], offsets[e + 1])
  kMasked = 2,  // [L, capacity, H]: rows [e * capacity, e * capacity + counts[e])
};

// Where the router's weights meet the experts' outputs.
enum class CombineContract : uint8_t {
  kWeightsAtSource =
      1,             // runners return one row per (token, slot); the source weighs and sums in top-k order
  kPartialSums = 2,  // each rank returns one weighted sum per token; the source adds up the ranks
};

// Token rows grouped by local expert. Memory belongs to whoever made it (the arena of a forward pass).
struct ExpertBatch {
  BatchLayout layout = BatchLayout::kPacked;
  CombineContract combine = CombineContract::kWeightsAtSource;
  int64_t num_experts = 0;           // L
  const int64_t* offsets = nullptr;  // [L + 1], kPacked
  const int64_t* counts = nullptr;   // [L], kMasked
  int64_t capacity = 0;              // kMasked
  // kMasked: a hint for the choice of tiles, nothing else: (T * R * K + E) / E with this rank's T of the
  // round, about an expert's rows if every rank had as many and routing were even.
  int64_t expected_m = 0;
  ActRows x;                            // [rows, H]; with kMasked, rows past the counts are undefined
  const float* x_row_scales = nullptr;  // [rows] or null: row r stands for x[r] * x_row_scales[r]
  // x holds NVFP4 values already (code * block scale), of the layer's scalar a1 where w4a4 has one, else of
  // each row's own tensor scale: w4a4 does not quantise them again. x_row_scales are the tensor scales.
  bool x_is_nvfp4 = false;
  const int32_t* slot_of_row = nullptr;  // [rows], kPacked: t * K + k of the (token, slot) it came from
  const int32_t* row_of_slot = nullptr;  // [T * K]: its inverse; -1 where the slot's expert is not here
  float* y = nullptr;  // [rows, H], f32: the runner's output, down bias included, not weighted

  int64_t first_row(int64_t e) const { return layout == BatchLayout::kPacked ? offsets[e] : e * capacity; }
  int64_t num_rows(int64_t e) const {
    return layout == BatchLayout::kPacked ? offsets[e + 1] - offsets[e] : counts[e];
  }
};

// Groups T * K slots by local expert; stable, so rows of one expert keep the order of their slots and the
// result depends on the ids alone. ids are global; those outside [first_expert, first_expert + L) are
// dropped, -1 among them (row_of_slot -1). An expert that a token names twice gets two rows, each with its
// own weight.
struct ExpertSortArgs {
  const int32_t* ids = nullptr;  // [num_slots]
  int64_t num_slots = 0;         // T * K
  int64_t first_expert = 0, num_experts = 0;
  int64_t* offsets = nullptr;      // [L + 1] out
  int32_t* slot_of_row = nullptr;  // [num_slots] out; the first offsets[L] are written
  int32_t* row_of_slot = nullptr;  // [num_slots] out
};
void moe_sort(const ExpertSortArgs& args);

// The same order for runners that take whole tiles of one expert's rows: each expert's rows start on a tile
// ("permuted" rows), behind them is padding. Experts without rows have no tile.
struct MoeTileArgs {
  int64_t num_slots = 0, num_experts = 0;  // as in ExpertSortArgs
  int64_t tile = 128;                      // rows
  const int64_t* offsets = nullptr;        // as moe_sort() made them
  const int32_t* slot_of_row = nullptr;
  int32_t* expert_of_tile = nullptr;     // [max_tiles] out: local expert
  int32_t* row_limit_of_tile = nullptr;  // [max_tiles] out: permuted row after the tile's last token
  int32_t* permuted_of_slot = nullptr;   // [num_slots] out; -1 where the slot's expert is not here
  int32_t* slot_of_permuted = nullptr;   // [max_tiles * tile] out; padding is not written
};
struct MoeTiles {
  int64_t num_tiles = 0, num_padded_rows = 0;  // written; rows = num_tiles * tile
};
MoeTiles moe_sort_tiles(const MoeTileArgs& args);
// Most tiles that num_slots rows over num_experts can make.
constexpr int64_t max_moe_tiles(int64_t num_slots, int64_t num_experts, int64_t tile) {
  return num_slots <= num_experts ? num_slots : (num_slots + (tile - 1) * num_experts) / tile;
}

}  // namespace fp4moe
