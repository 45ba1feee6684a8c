// The table of Hopper's MoE ops. A whole layer of them: sort, both GEMMs in one launch, combine.
#include "kernels/cuda/moe_sort.h"
#include "kernels/cuda/router.h"
#include "kernels/cuda/sm90_expert_gemm.h"
#include "kernels/cuda/sorted_layer.h"
#include "kernels/device_act_quant.h"
#include "kernels/device_moe_fp8.h"

namespace fp4moe {
namespace {

void layer(const DeviceMoeArgs& a) { run_sorted_layer(a, sm90_gate_up_down); }

constexpr DeviceMoeOps kSm90MoeOps = {.name = "sm90",
                                      .tile_rows_alignment = 8,
                                      .sort = moe_sort,
                                      .gate_up = sm90_gate_up,
                                      .down = sm90_down,
                                      .combine = moe_combine,
                                      .layer = layer,
                                      .layer_workspace_bytes = sorted_layer_workspace_bytes,
                                      .route = cuda_route,
                                      .quantize = cuda_quantize_act,
                                      .gate_up_fp8 = sm90_fp8_gate_up,
                                      .down_fp8 = sm90_fp8_down};

}  // namespace

const DeviceMoeOps* sm90_moe_ops() { return &kSm90MoeOps; }

}  // namespace fp4moe
