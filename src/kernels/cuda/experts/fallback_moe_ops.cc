// The table of MoE ops for GPUs that have no specialised kernels.
#include "kernels/cuda/experts/fallback_expert_gemm.h"
#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/experts/sorted_layer.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/device_act_quant.h"

namespace fp4moe {
namespace {

void gemms(const DeviceExpertArgs& a) {
  fallback_gate_up(a);
  fallback_down(a);
}

constexpr DeviceMoeTactic kTactics[] = {
    {.name = "sorted",
     .fits = sorted_layer_fits,
     .layer = [](const DeviceMoeArgs& a) { run_sorted_layer(a, gemms, /*may_return=*/false); },
     .workspace_bytes = sorted_layer_workspace_bytes,
     .leaves_rows = true}};

constexpr DeviceMoeOps kFallbackMoeOps = {.name = "cuda_mma",
                                          .tile_rows_alignment = 8,
                                          .sort = moe_sort,
                                          .gate_up = fallback_gate_up,
                                          .down = fallback_down,
                                          .combine = moe_combine,
                                          .tactics = kTactics,
                                          .default_tactic = [](const DeviceMoeArgs&) -> size_t { return 0; },
                                          .route = cuda_route,
                                          .route_fuses_norm = cuda_route_fuses_norm,
                                          .route_sends = cuda_route_sends,
                                          .quantize = cuda_quantize_act};

}  // namespace

const DeviceMoeOps* fallback_moe_ops() { return &kFallbackMoeOps; }

}  // namespace fp4moe
