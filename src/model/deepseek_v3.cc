#include "base/check.h"
#include "model/families.h"
#include "model/feed_forward.h"
#include "model/weight_loader.h"

namespace fp4moe {

Result<DecoderLayer> load_deepseek_v3_layer(WeightLoader& loader, int64_t layer) {
  const ModelConfig& config = loader.config();
  DecoderLayer out;
  FP4MOE_RETURN_IF_ERROR(load_norms(loader, layer, out));
  FP4MOE_ASSIGN_OR_RETURN(out.attention, load_mla(loader, layer_prefix(layer) + "self_attn."));
  FP4MOE_ASSIGN_OR_RETURN(
      out.attention_out, load_attention_out(loader, layer, out.attention->out_cols(), config.attention_bias));
  if (!config.layer_has_experts[static_cast<size_t>(layer)]) {
    FP4MOE_ASSIGN_OR_RETURN(out.mlp, load_dense_mlp(loader, layer));
    return out;
  }
  FP4MOE_ASSIGN_OR_RETURN(out.moe, load_moe(loader, layer,
                                            {.scoring = RouterScoring::kSigmoidGrouped,
                                             .router = "mlp.gate",
                                             .shared_expert = "mlp.shared_experts"}));
  return out;
}

}  // namespace fp4moe
