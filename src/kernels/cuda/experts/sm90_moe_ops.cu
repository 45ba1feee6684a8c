// The tables of Hopper's MoE ops, and their tactics for whole layers.
//   sorted      sort, both GEMMs in one launch, combine
//   few_tokens  everything in one launch, up to 8 tokens
//   wide        sort, gather of rows by expert, one launch for each GEMM with up to 256 tokens per tile,
//               combine; the only tactic for bf16 experts
#include "kernels/cuda/experts/fallback_expert_gemm.h"
#include "kernels/cuda/experts/few_tokens.h"
#include "kernels/cuda/experts/linear_few_tiles.h"
#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/experts/sm90_expert_gemm.h"
#include "kernels/cuda/experts/sorted_layer.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/device_act_quant.h"

namespace fp4moe {
namespace {

constexpr DeviceMoeTactic kTactics[] = {
    {.name = "sorted",
     .fits = sorted_layer_fits_shared,
     .layer = [](const DeviceMoeArgs& a) { run_sorted_layer(a, sm90_gate_up_down, /*may_return=*/true); },
     .workspace_bytes = sorted_layer_workspace_bytes,
     .leaves_rows = true},
    {.name = "few_tokens",
     .fits = [](const DeviceMoeArgs& a) { return few_tokens_fits(a, FewWeights::kBf16); },
     .layer = [](const DeviceMoeArgs& a) { few_tokens_layer(a, FewWeights::kBf16); },
     .workspace_bytes = [](const TiledExperts& experts, int64_t,
                           int64_t topk) { return few_tokens_workspace_bytes(experts, topk); }},
    {.name = "wide",
     .fits = sorted_layer_fits,
     .layer = run_wide_layer,
     .workspace_bytes = wide_layer_workspace_bytes,
     .leaves_rows = true}};
enum : size_t { kSorted, kFewTokens, kWide };

// The limit on rows was measured on an H200.
size_t default_tactic(const DeviceMoeArgs& args) {
  return tactic_by_size(args, {FewWeights::kBf16, /*wide_rows=*/80, kFewTokens, kWide, kSorted});
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
                                      .route_fuses_norm = cuda_route_fuses_norm,
                                      .route_sends = cuda_route_sends,
                                      .quantize = cuda_quantize_act,
                                      .linear_fits = linear_few_tiles_fits,
                                      .linear = linear_few_tiles,
                                      .direct_fits = kTactics[kFewTokens].fits,
                                      .direct = kTactics[kFewTokens].layer};

constexpr DeviceMoeTactic kBf16Tactics[] = {{.name = "wide",
                                             .fits = sorted_layer_fits,
                                             .layer = run_wide_layer,
                                             .workspace_bytes = wide_layer_workspace_bytes,
                                             .leaves_rows = true}};

constexpr DeviceMoeOps kSm90Bf16MoeOps = {.name = "sm90_bf16",
                                          .tile_rows_alignment = 8,
                                          .sort = moe_sort,
                                          .gate_up = fallback_gate_up,
                                          .down = fallback_down,
                                          .combine = moe_combine,
                                          .tactics = kBf16Tactics,
                                          .default_tactic = [](const DeviceMoeArgs&) -> size_t { return 0; },
                                          .route = cuda_route,
                                          .route_fuses_norm = cuda_route_fuses_norm,
                                          .route_sends = cuda_route_sends,
                                          .quantize = cuda_quantize_act};

}  // namespace

const DeviceMoeOps* sm90_bf16_moe_ops() { return &kSm90Bf16MoeOps; }
const DeviceMoeOps* sm90_moe_ops() { return &kSm90MoeOps; }

}  // namespace fp4moe
