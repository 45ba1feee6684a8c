#include "base/check.h"
#include "model/families.h"
#include "model/feed_forward.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

Result<DecoderLayer> load_layer(WeightLoader& loader, int64_t layer, bool output_bias, const MoeNames& moe) {
  DecoderLayer out;
  FP4MOE_RETURN_IF_ERROR(load_norms(loader, layer, out));
  FP4MOE_ASSIGN_OR_RETURN(out.attention,
                          load_gqa(loader, layer_prefix(layer) + "self_attn.", {.layer = layer}));
  FP4MOE_ASSIGN_OR_RETURN(out.attention_out,
                          load_attention_out(loader, layer, out.attention->out_cols(), output_bias));
  if (!loader.config().layer_has_experts[static_cast<size_t>(layer)]) {
    FP4MOE_ASSIGN_OR_RETURN(out.mlp, load_dense_mlp(loader, layer));
    return out;
  }
  FP4MOE_ASSIGN_OR_RETURN(out.moe, load_moe(loader, layer, moe));
  return out;
}

}  // namespace

Result<DecoderLayer> load_qwen2_moe_layer(WeightLoader& loader, int64_t layer) {
  return load_layer(loader, layer, /*output_bias=*/false,
                    {.scoring = RouterScoring::kSoftmaxTopk,
                     .router = "mlp.gate",
                     .shared_expert = "mlp.shared_expert",
                     .shared_gate = "mlp.shared_expert_gate.weight"});
}

Result<DecoderLayer> load_qwen3_moe_layer(WeightLoader& loader, int64_t layer) {
  return load_layer(loader, layer, loader.config().attention_bias,
                    {.scoring = RouterScoring::kSoftmaxTopk, .router = "mlp.gate"});
}

}  // namespace fp4moe
