// Runs a whole layer on a GPU: sort, both GEMMs, combine. Implements the w4a16 tactics "sorted" and "wide".
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/experts/few_tokens.h"
#include "kernels/device_moe.h"

namespace fp4moe {

// Hopper's rule for choosing a tactic by size, for tables whose tactics have these indices. Few tokens use
// one launch if they read few bytes of expert weights; otherwise, more than `wide_rows` rows per expert on
// average use "wide", and fewer use "sorted".
struct TacticRule {
  FewWeights weights;
  int64_t wide_rows;
  size_t few_tokens, wide, sorted;
};
size_t tactic_by_size(const DeviceMoeArgs& args, const TacticRule& rule);

// layer_sort_args() and layer_gemm_args() return the arguments for a layer's steps, as far as the layer's own
// arguments determine them; combine_layer() runs the last step, after down(gemm). `rows` is in the workspace.
MoeSortArgs layer_sort_args(const DeviceMoeArgs& args, const DeviceRows& rows, int32_t* scratch);
DeviceExpertArgs layer_gemm_args(const DeviceMoeArgs& args, const DeviceRows& rows);  // activations not set
void combine_layer(const DeviceMoeArgs& args, const DeviceExpertArgs& gemm);
// Returns DeviceExpertArgs::returns for a GEMM that takes it: null if combine_layer() returns the rows.
const A2aRound* layer_returns(const DeviceMoeArgs& args);
// Returns where down writes its rows: to the output if this needs no combine_layer(), which then does
// nothing, else to `scratch`.
bf16* layer_y(const DeviceMoeArgs& args, bf16* scratch);

// Runs the layer. `gemms` runs gate_up and down, with the intermediate as h and rows.progress as counters.
// may_return: it takes DeviceExpertArgs::returns.
void run_sorted_layer(const DeviceMoeArgs& args, void (*gemms)(const DeviceExpertArgs&), bool may_return);
constexpr bool sorted_layer_fits(const DeviceMoeArgs& args) { return !args.shared.exists; }
// For `gemms` that can run the shared expert after the others. With more tokens, its own launch is faster.
constexpr int64_t kMostSharedTokens = 256;
constexpr bool sorted_layer_fits_shared(const DeviceMoeArgs& args) {
  return !args.shared.exists || (args.shared.is_tiled() && args.num_tokens <= kMostSharedTokens);
}
// With a shared expert: for a topk greater by 1.
int64_t sorted_layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk);

// Like run_sorted_layer(), but with rows gathered into slabs. Hopper only.
void run_wide_layer(const DeviceMoeArgs& args);
int64_t wide_layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk);

}  // namespace fp4moe
