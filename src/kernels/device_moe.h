// The ops of a MoE layer on a GPU, declared once: sort, expert GEMMs, combine. Implementations: kernels/cuda.
//
// The conventions of kernels/ops.h hold; all pointers are device memory unless noted otherwise, and work is
// enqueued on the calling thread's current stream (device/stream.h). Nothing allocates, waits for the device
// or reads back from it, so everything can be captured into a graph. Counts stay on the device: launches
// depend only on the sizes in the arguments, and T = 0 is allowed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "formats/fp4_matrix.h"
#include "kernels/expert_ops.h"
#include "kernels/ops.h"
#include "kernels/weight_bytes.h"

namespace fp4moe {

// L experts' weights in tiles (kernels/cuda/layout/tile_layout.h).
struct TiledExperts {
  Fp4Format format = Fp4Format::kMxfp4;
  int64_t num_experts = 0;        // L
  int64_t hidden_size = 0;        // H
  int64_t intermediate_size = 0;  // I
  Activation activation;
  const uint8_t* gate_up = nullptr;     // [L] matrices [gated ? 2 I : I, H], gate and up rows interleaved
  const uint8_t* down = nullptr;        // [L] matrices [H, I]
  const float* gate_up_bias = nullptr;  // [L, 2, I]: gate, then up; not gated: [L, I]; null: no bias
  const float* down_bias = nullptr;     // [L, H] or null
  const float* scales = nullptr;        // [L, 3]: scale factors for the gate, up and down sums
};

// Which rows each local expert has: packed (row r of expert e is offsets[e] + r) or masked (e * capacity +
// r). Written by sort(), read by the GEMMs.
struct DeviceRows {
  int64_t max_rows = 0;            // packed: rows that the buffers can hold; masked: L * capacity
  int64_t capacity = 0;            // 0: packed
  int32_t* offsets = nullptr;      // packed: [L + 1]
  int32_t* counts = nullptr;       // [L]; masked_m of a masked batch
  int32_t* slot_of_row = nullptr;  // [max_rows]: t * topk + k; rows past an expert's last are not written
  int32_t* row_of_slot = nullptr;  // [T * topk]; -1: not a local expert, invalid id, or past the capacity
  int32_t* progress = nullptr;     // [1 + L] or null: counters, zeroed by sort(), for a launch that runs both
                                   // GEMMs
};

struct A2aRound;  // kernels/device_a2a.h

struct MoeSortArgs {  // sorts each expert's rows by ascending slot; counts continue past a capacity
  // [T, topk] global ids; ids outside [first_expert, first_expert + L) are dropped. Null: all first_expert.
  const int32_t* ids = nullptr;
  int64_t num_tokens = 0, topk = 0;
  int64_t first_expert = 0, num_experts = 0;  // L local experts
  // A shared expert, which has all tokens, follows: offsets[L] = T * topk, counts[L] = T, and its row of
  // token t is that of slot t * topk. Only with packed rows; counts is [L + 1], progress [L + 2].
  bool has_shared = false;
  DeviceRows rows;
  // [kSortBlocks, L], or null: one block sorts all slots, which is slow if there are many.
  int32_t* scratch = nullptr;
};
constexpr int kSortBlocks = 64;

// Both GEMMs of a layer over sorted rows.
struct DeviceExpertArgs {
  TiledExperts experts;
  DeviceRows rows;
  int64_t num_tokens = 0, topk = 1;
  // Expected rows of an active expert: a hint for the choice of tiles (deepep's expected_m) that never
  // changes bits; 0: max_rows / L.
  int64_t expected_rows = 0;
  ActRows x;  // bf16. gather: [T, H], an expert's row is row slot / topk of it; else [max_rows, H]
  bool gather = true;
  const float* x_row_scales = nullptr;  // per row of x, or null: multiplies the gate and up sums
  ActRows intermediate;                 // [max_rows, I], bf16 or f32, written by gate_up
  ActRows h;                            // down's input: `intermediate` or its quantised copy; bf16
  const float* h_row_scales = nullptr;  // [max_rows] or null
  float* y = nullptr;                   // [max_rows, H], written by down: not yet weighted by the router
  bf16* y_bf16 = nullptr;               // written instead of y: the same values, rounded
  // If set, down does not write y_bf16: the same values go to the A2aSlotPlaces of this exchange, whose lanes
  // are the tokens. Only for sm90_expert_gemm.h.
  const A2aRound* returns = nullptr;
};

// Rows that are added to a layer's output last: out[t] += sigmoid(gate . x[t]) * rows[t].
struct AddedRows {
  const float* rows = nullptr;      // [T, H], or null
  const bf16* rows_bf16 = nullptr;  // [T, H], instead of rows
  const float* gate = nullptr;      // [H] or null: the factor is 1
  const float* x = nullptr;         // [T, H]
  bool exist() const { return rows != nullptr || rows_bf16 != nullptr; }
};

struct MoeCombineArgs {  // out[t] (+)= sum over k, in top-k order, of weight[t, k] * y[row_of_slot[t, k]]
  const float* y = nullptr;
  const bf16* y_bf16 = nullptr;          // instead of y
  const int32_t* row_of_slot = nullptr;  // [T, topk]; -1 contributes 0
  const float* weights = nullptr;        // [T, topk]; null: 1
  int64_t num_tokens = 0, topk = 0, hidden_size = 0;
  float* out = nullptr;      // [T, H] f32, or null
  bool accumulate = false;   // add to out
  bf16* out_bf16 = nullptr;  // [T, H], or null
  AddedRows added;           // only with out, and without out_bf16
};

// A shared expert that is one more expert of every token, added after its topk experts.
struct SharedSlot {
  bool exists = false;
  const float* gate = nullptr;  // [H] or null: the expert's weight is sigmoid(gate . x[t]); null: 1
  const float* x = nullptr;     // [T, H]: the tokens before rounding
  // A gated MLP with bf16 weights, row-major, and silu; null: its tiles, biases and scales follow those of
  // the L experts.
  const bf16* gate_up = nullptr;  // [2 I, H]: gate, then up
  const bf16* down = nullptr;     // [H, I]
  int64_t intermediate_size = 0;  // I

  constexpr bool is_tiled() const { return exists && gate_up == nullptr; }
};

// One matrix in tiles, the down projection of a single expert without an activation, for few tokens: out
// [T, N] = x W^T + bias, where N is matrix.hidden_size and K is matrix.intermediate_size.
struct TiledLinearArgs {
  TiledExperts matrix;
  const bf16* x = nullptr;            // [T, K]; not read with a norm
  const RmsNormArgs* norm = nullptr;  // or x = this norm's output; norm.out_act is not written
  int64_t num_tokens = 0;
  float* out = nullptr;  // [T, N]
};

// A whole layer after the router: sort, gate/up with the activation, down, combine; w4a16 or w4a8.
struct DeviceMoeArgs {
  TiledExperts experts;
  const bf16* x = nullptr;  // [T, H]
  // [T, topk] global ids; ids outside [first_expert, first_expert + L) are dropped. Null: all first_expert.
  const int32_t* ids = nullptr;
  const float* weights = nullptr;  // [T, topk]; null: 1
  int64_t num_tokens = 0, topk = 0, first_expert = 0;
  int64_t num_routed_experts = 0;  // E, the experts that ids can name; used only by size rules; 0: L
  SharedSlot shared;
  float* out = nullptr;  // [T, H] f32, or null
  bool accumulate = false;
  PartialsToSend* send = nullptr;  // if set, out is this rank's part of a sum; only without accumulate
  bf16* out_bf16 = nullptr;        // [T, H], or null
  // Instead of both outputs, if the tactic leaves_rows: receives the arguments, all but the outputs, that
  // combine the experts' rows. They are in the workspace.
  MoeCombineArgs* uncombined = nullptr;
  AddedRows added;  // as in MoeCombineArgs; only without `exchange`
  // Weights that a linear layer reads next. With few tokens, a part of them is fetched into the L2 as soon as
  // the experts' weights are on their way.
  WeightBytes next;
  // If set, the tokens are this exchange's lanes: results return to the lanes' ranks, and `out` is [num_own,
  // H] of this rank's tokens, which the layer adds to.
  const A2aRound* exchange = nullptr;
  // DeviceMoeOps::direct(): the tokens are a direct round's lanes. x, ids, weights and outputs are not used.
  const A2aRound* direct = nullptr;
  // kMoeCounterBytes bytes: zeroed before the first call and not touched between calls; all calls use one
  // stream.
  uint8_t* counters = nullptr;
  uint8_t* workspace = nullptr;  // the tactic's workspace_bytes(), 64-byte aligned
};
constexpr int64_t kMoeCounterBytes = 8192;  // grid barriers and arrival counters

// One way to run a MoE layer. All tactics of a table read the same tiles and compute the same function; they
// differ in speed and in the last bits of sums.
struct DeviceMoeTactic {
  const char* name;
  // Returns whether the tactic can run a layer. Depends only on the current GPU, on sizes (the experts',
  // num_tokens and topk), on shared.exists and on whether rows are added. A tactic that fits T tokens also
  // fits fewer tokens.
  bool (*fits)(const DeviceMoeArgs&);
  void (*layer)(const DeviceMoeArgs&);  // precondition: fits()
  int64_t (*workspace_bytes)(const TiledExperts& experts, int64_t max_tokens, int64_t topk);
  bool leaves_rows = false;  // whether layer() allows DeviceMoeArgs::uncombined
};

struct DeviceRouterArgs;    // kernels/device_router.h
struct DeviceActQuantArgs;  // kernels/device_act_quant.h

// The ops for one kind of GPU and one tile format: that of w4a16, which w4a4 also uses, or that of w4a8.
// Preconditions are in the arguments' comments.
struct DeviceMoeOps {
  const char* name;         // "sm90", "sm90_fp8", "cuda_mma"
  int tile_rows_alignment;  // the GEMMs pad an expert's rows to a multiple of this, only in registers
  void (*sort)(const MoeSortArgs&);
  void (*gate_up)(const DeviceExpertArgs&);
  void (*down)(const DeviceExpertArgs&);
  void (*combine)(const MoeCombineArgs&);
  std::span<const DeviceMoeTactic> tactics;  // the first fits every layer without a SharedSlot
  // Returns the index of a fitting tactic, by the current GPU and the sizes alone. For sizes that were not
  // timed.
  size_t (*default_tactic)(const DeviceMoeArgs&);
  void (*route)(const DeviceRouterArgs&);
  // Returns whether route() runs a norm in the router's launch. Depends on the sizes, the rule and
  // batch_invariant.
  bool (*route_fuses_norm)(const DeviceRouterArgs&);
  // Returns whether route() with a norm can also send args.round. Depends on the same, and on the round's
  // sizes and kind.
  bool (*route_sends)(const DeviceRouterArgs&);
  void (*quantize)(const DeviceActQuantArgs&);
  // Returns whether linear() can run the layer, by its sizes and whether it has a norm. Null: there is no
  // linear().
  bool (*linear_fits)(const TiledLinearArgs&) = nullptr;
  void (*linear)(const TiledLinearArgs&) = nullptr;  // precondition: linear_fits()
  // Runs a layer on the lanes of a direct round (kernels/device_a2a.h). Null: there is no direct().
  bool (*direct_fits)(const DeviceMoeArgs&) = nullptr;
  void (*direct)(const DeviceMoeArgs&) = nullptr;  // precondition: direct_fits()
};

inline void run_layer(const DeviceMoeOps& ops, const DeviceMoeArgs& args) {
  ops.tactics[ops.default_tactic(args)].layer(args);
}
// Returns a workspace size that is enough for every tactic.
inline int64_t layer_workspace_bytes(const DeviceMoeOps& ops, const TiledExperts& experts, int64_t max_tokens,
                                     int64_t topk) {
  int64_t most = 0;
  for (const DeviceMoeTactic& tactic : ops.tactics)
    most = std::max(most, tactic.workspace_bytes(experts, max_tokens, topk));
  return most;
}

// Returns the ops for Hopper (wgmma), or null in a build without CUDA.
const DeviceMoeOps* sm90_moe_ops();
// The same for experts in bf16 tiles.
const DeviceMoeOps* sm90_bf16_moe_ops();
// Returns the ops for every GPU since Ampere and all tile formats: mma.sync, in PTX that the driver compiles.
// They are correct on all of these GPUs and tuned for none; null in a build without CUDA.
const DeviceMoeOps* fallback_moe_ops();

}  // namespace fp4moe
