// Kernels that send token rows to the GPUs of their experts and return the results (docs/a2a.md).
//
// In a round every rank has T tokens, of which the last may be padding. Rank s stores token t's row in lane
// (s, t) of each rank that has one of the token's experts, and the token's expert ids and weights in lane
// (s, t) of all ranks. The lanes of a rank are then a batch of R x T tokens, in which ids of other ranks'
// experts are dropped: a layer runs on it as on any batch. Results return to places that both sides compute
// from the ids. No count is exchanged, nothing can overflow, and nothing depends on the host.
//
// A round of up to kDirectLanes lanes can be direct: the experts' kernel (DeviceMoeOps::direct) waits for the
// rows itself and stores its sums on the tokens' ranks, and no kernel waits for another rank's flags.
#pragma once

#include <algorithm>
#include <cstdint>

#include "formats/bf16.h"
#include "formats/fp8.h"
#include "formats/nvfp4.h"
#include "kernels/device_comm.h"

namespace fp4moe {

// The encoding of a row in its lane.
enum class A2aRowFormat : uint8_t {
  kBf16,   // [H] bf16
  kFp8,    // [H] e4m3, then the f32 scale of each group of 128 columns (formats/fp8.h)
  kNvfp4,  // [H / 2] codes, [H / 16] e4m3 block scales, padding to 4 bytes, then the f32 tensor scale
};
// The encoding of a result.
enum class A2aResultFormat : uint8_t {
  kF32,
  kBf16,
  kFp8,  // e4m3, saturating, without a scale
};

// The sizes of an exchange; the same on all ranks.
struct A2aShape {
  int64_t hidden_size = 0;  // H; a multiple of 8
  int64_t top_k = 0;        // K
  int64_t num_experts = 0;  // E
  // n: rank r has the experts [r n, (r + 1) n). 0: every rank has a part of every expert.
  int64_t experts_per_rank = 0;
  A2aRowFormat row_format = A2aRowFormat::kBf16;  // kNvfp4: H must be a multiple of 16
  A2aResultFormat result_format = A2aResultFormat::kBf16;
  // True: each slot's row returns, before the router's weights are applied. False: each rank's weighted sum
  // returns.
  bool slots_return = false;
  // The ranks do not share memory (CommGroup::plane): each rank's results for another are stored in a staging
  // area, and travel from there.
  bool is_staged = false;

  // Whether rounds can be direct. All ranks have experts of the same sizes, so they all choose alike.
  constexpr bool allows_direct(int num_ranks) const {
    return row_format == A2aRowFormat::kBf16 && result_format != A2aResultFormat::kFp8 && !slots_return &&
           !is_staged && num_experts == num_ranks * experts_per_rank;
  }
  // Whether the experts' kernel can store its rows in their places on the tokens' ranks (A2aSlotPlaces).
  constexpr bool allows_returned_rows() const {
    return slots_return && !is_staged && result_format == A2aResultFormat::kBf16 && experts_per_rank > 0;
  }
  // Returns the largest number of results per token from one rank.
  constexpr int64_t parts_of_rank() const { return slots_return ? top_k : 1; }
  // Returns the largest number of results per token.
  constexpr int64_t parts(int num_ranks) const {
    if (slots_return) return top_k;
    return experts_per_rank == 0 ? num_ranks : std::min<int64_t>(num_ranks, top_k);
  }
  // Offset of a row's group or block scales, and of its tensor scale, in bytes.
  constexpr int64_t scales_offset() const {
    return row_format == A2aRowFormat::kNvfp4 ? hidden_size / 2 : hidden_size;
  }
  constexpr int64_t tensor_scale_offset() const {
    return (hidden_size / 2 + hidden_size / kNvfp4Block + 3) / 4 * 4;
  }
  // A row in its lane; a multiple of 16.
  constexpr int64_t row_bytes() const {
    const int64_t bytes = row_format == A2aRowFormat::kBf16 ? hidden_size * 2
                          : row_format == A2aRowFormat::kFp8
                              ? scales_offset() + (hidden_size + kFp8Group - 1) / kFp8Group * 4
                              : tensor_scale_offset() + 4;
    return (bytes + 15) / 16 * 16;
  }
  constexpr int64_t result_bytes() const {
    return hidden_size * (result_format == A2aResultFormat::kF32    ? 4
                          : result_format == A2aResultFormat::kBf16 ? 2
                                                                    : 1);
  }
};

// Byte offsets in a rank's exchange memory (CommLayout::exchange), for rounds of up to max_tokens tokens.
struct A2aArea {
  int64_t rows = 0;      // [R][T][row_bytes]
  int64_t ids = 0;       // [R][T][K] i32: global ids; -1: padding, or not an expert
  int64_t weights = 0;   // [R][T][K] f32
  int64_t returns = 0;   // [T][parts][result_bytes]; is_staged: by source, as `outgoing`
  int64_t outgoing = 0;  // is_staged: results for other ranks, [R][T][parts_of_rank][result_bytes]
  // Of direct rounds, if the shape allows them: lanes in two buffers that are used in turn, and results. All
  // are marked words (kernels/cuda/comm/group.cuh).
  int64_t direct_rows = 0;   // [2][kDirectLanes][H] bf16
  int64_t direct_slots = 0;  // [2][kDirectLanes][K] of an id, as in `ids`, and an f32 weight
  int64_t direct_sums = 0;   // [T][R][result_bytes], R T <= kDirectLanes
  int64_t num_bytes = 0;
};
constexpr int kDirectLanes = 8;
constexpr A2aArea a2a_area(const A2aShape& shape, int num_ranks, int64_t max_tokens) {
  const int64_t lanes = num_ranks * max_tokens;
  int64_t used = 0;
  const auto take = [&used](int64_t num_bytes) {
    const int64_t offset = used;
    used += (num_bytes + 127) / 128 * 128;
    return offset;
  };
  A2aArea area;
  area.rows = take(lanes * shape.row_bytes());
  area.ids = take(lanes * shape.top_k * 4);
  area.weights = take(lanes * shape.top_k * 4);
  const int64_t parts = shape.is_staged ? num_ranks * shape.parts_of_rank() : shape.parts(num_ranks);
  area.returns = take(max_tokens * parts * shape.result_bytes());
  if (shape.is_staged) area.outgoing = take(max_tokens * parts * shape.result_bytes());
  if (shape.allows_direct(num_ranks)) {
    area.direct_rows = take(2 * kDirectLanes * shape.row_bytes());
    area.direct_slots = take(2 * kDirectLanes * shape.top_k * 8);
    area.direct_sums = take(kDirectLanes * shape.result_bytes());
  }
  area.num_bytes = used;
  return area;
}

// One round, as a rank sees it. `group`, `shape`, `area` and num_tokens are the same on all ranks.
struct A2aRound {
  CommGroup group;
  CommOp op;
  A2aShape shape;
  A2aArea area;
  int64_t num_tokens = 0;  // T
  int64_t num_own = 0;     // how many of the T tokens are this rank's; the rest are padding
  int64_t first_own = 0;   // index of the first of these among the rank's tokens of the layer
  // Tokens numbered *num_filled and higher (device memory; null: no tokens) are padding too; the round's
  // first token has the number first_token.
  const int32_t* num_filled = nullptr;
  int64_t first_token = 0;
  const int32_t* ids = nullptr;    // [num_own, K]
  const float* weights = nullptr;  // [num_own, K]
  // NVFP4 rows: the encode scale of all rows ([1], device memory); null: each row has one.
  const float* nvfp4_scale = nullptr;
};

// The lanes' rows in bf16, for a round with another row format; rows without a local expert are not written.
struct A2aDecoded {
  bf16* rows = nullptr;  // [R T, H]
  // NVFP4 rows stay code * block scale, which is exact in bf16; otherwise they are multiplied by their tensor
  // scales too.
  bool keeps_nvfp4 = false;
  float* tensor_scales = nullptr;  // [R T], or null; only with keeps_nvfp4
};

// Where the result of each slot of a batch of lanes returns to, in bf16. A kernel may store results there
// after wait(): the rows of a round show that the token's rank has added the results of the round before,
// which the new ones replace. A rank's own results follow its own combine() in stream order.
struct A2aSlotPlaces {
  int num_slots = 0;        // T K, of a rank; 0: no places
  float inverse_slots = 0;  // 1 / num_slots: slot s is of rank floor((s + 0.5) inverse_slots)
  // The results [T, K, H] of each rank's tokens, in the order of the lanes. While the group rehearses, those
  // of the ranks outside are where this rank's are.
  bf16* of_rank[kMaxGroupRanks] = {};
};
// Precondition: shape.allows_returned_rows().
inline A2aSlotPlaces a2a_slot_places(const A2aRound& round) {
  A2aSlotPlaces places{.num_slots = static_cast<int>(round.num_tokens * round.shape.top_k)};
  places.inverse_slots = 1 / static_cast<float>(places.num_slots);
  for (int r = 0; r < kMaxGroupRanks; ++r) {
    uint8_t* const region = round.group.regions[r < round.group.size ? r : round.group.rank];
    places.of_rank[r] = reinterpret_cast<bf16*>(region + round.group.layout.exchange + round.area.returns);
  }
  return places;
}

// The experts' results for a batch of lanes: sums [R T, H] f32, already weighted (not with slots_return); or
// rows grouped by expert; or nothing, if the preceding kernel has stored all results in their A2aSlotPlaces.
// Sums and rows must not be in exchange memory, which peers may write while they are still being read.
struct A2aResults {
  const float* sums = nullptr;
  const bf16* y_bf16 = nullptr;          // [rows, H]
  const float* y = nullptr;              // instead of y_bf16
  const int32_t* row_of_slot = nullptr;  // of rows: [R T, K]; -1: not a local expert
  bool are_returned = false;  // this rank's results are in their places; the other members are null
};

// The physical experts of a rank's rows, as ReplicaTable (moe/placement/expert_placement.h) in device memory.
struct A2aReplicas {
  const int32_t* first = nullptr;     // [E + 1]
  const int32_t* replicas = nullptr;  // [first[E]]
  int64_t num_experts = 0;            // E
  int64_t rank = 0;
};

// Each op is one launch on the current stream; all ranks make the same calls in the same order. A round calls
// send, wait and combine, in this order; the stream may do other work between them.
struct DeviceA2aOps {
  // Stores x [num_own, H] bf16, the ids and the weights in the ranks' lanes.
  void (*send)(const A2aRound& round, const bf16* x);
  // Waits until all ranks' rows are in this rank's lanes, and decodes them unless they are bf16.
  void (*wait)(const A2aRound& round, const A2aDecoded& decoded);
  // Returns the lanes' results to the tokens' ranks, unless they are there, and adds the sum of the results
  // of each of this rank's tokens to out [num_own, H] f32. With slots_return it sums weighted slots in top-k
  // order, with one f32 fma per slot; otherwise it sums ranks in ascending order. A rank's own results are
  // read in place, rounded to the format of those that return.
  void (*combine)(const A2aRound& round, const A2aResults& results, float* out);
  // Direct rounds: send_direct, DeviceMoeOps::direct, add_direct. Each token has results from all ranks.
  void (*send_direct)(const A2aRound& round, const bf16* x);
  // Adds to out [num_own, H] f32 the results of this rank's tokens as combine() does, as they arrive.
  void (*add_direct)(const A2aRound& round, float* out);
  // Sets out [n] to 0.
  void (*clear)(float* out, int64_t n);
  // out [T, K]: ReplicaTable::replica_of(ids [t, k], t); -1 for ids outside [0, E).
  void (*choose_replicas)(const A2aReplicas& table, const int32_t* ids, int64_t num_tokens, int64_t top_k,
                          int32_t* out);
};
// Returns null in a build without CUDA.
const DeviceA2aOps* cuda_a2a_ops();

}  // namespace fp4moe
