// The table of Hopper's MoE ops, and its tactics for whole layers.
//   sorted      sort, both GEMMs in one launch, combine
//   few_tokens  everything in one launch, up to 8 tokens
//   wide        sort, rows gathered by expert, a launch for each GEMM with up to 256 tokens a tile, combine
#include <algorithm>

#include "kernels/cuda/few_tokens.h"
#include "kernels/cuda/moe_sort.h"
#include "kernels/cuda/router.h"
#include "kernels/cuda/sm90_expert_gemm.h"
#include "kernels/cuda/sorted_layer.h"
#include "kernels/device_act_quant.h"
#include "kernels/device_moe_fp8.h"

namespace fp4moe {
namespace {

constexpr DeviceMoeTactic kTactics[] = {
    {.name = "sorted",
     .fits = sorted_layer_fits,
     .layer = [](const DeviceMoeArgs& a) { run_sorted_layer(a, sm90_gate_up_down); },
     .workspace_bytes = sorted_layer_workspace_bytes},
    {.name = "few_tokens",
     .fits = few_tokens_fits,
     .layer = few_tokens_layer,
     .workspace_bytes = [](const TiledExperts& experts, int64_t,
                           int64_t topk) { return few_tokens_workspace_bytes(experts, topk); }},
    {.name = "wide",
     .fits = sorted_layer_fits,
     .layer = run_wide_layer,
     .workspace_bytes = wide_layer_workspace_bytes}};
enum : size_t { kSorted, kFewTokens, kWide };

// Measured on an H200. One launch wins while little is read; then it depends on the rows of an expert.
constexpr double kFewTokensBytes = 375e6;
constexpr int64_t kWideRows = 80;
size_t default_tactic(const DeviceMoeArgs& args) {
  const TiledExperts& e = args.experts;
  const int64_t pairs = args.num_tokens * args.topk,
                experts = std::max(args.num_routed_experts, e.num_experts);
  const auto local =
      static_cast<double>(pairs) * static_cast<double>(e.num_experts) / static_cast<double>(experts);
  const auto expert_bytes = static_cast<double>(3 * e.hidden_size * e.intermediate_size / 2);
  if (few_tokens_fits(args) && local * expert_bytes <= kFewTokensBytes) return kFewTokens;
  return pairs > kWideRows * experts ? kWide : kSorted;
}

constexpr DeviceMoeOps kSm90MoeOps = {.name = "sm90",
                                      .tile_rows_alignment = 8,
                                      .sort = moe_sort,
                                      .gate_up = sm90_gate_up,
                                      .down = sm90_down,
                                      .combine = moe_combine,
                                      .tactics = kTactics,
                                      .default_tactic = default_tactic,
                                      .route = cuda_route,
                                      .quantize = cuda_quantize_act,
                                      .gate_up_fp8 = sm90_fp8_gate_up,
                                      .down_fp8 = sm90_fp8_down};

}  // namespace

const DeviceMoeOps* sm90_moe_ops() { return &kSm90MoeOps; }

}  // namespace fp4moe
