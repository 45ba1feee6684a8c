#include "base/check.h"
#include "model/families.h"
#include "model/feed_forward.h"
#include "model/weight_loader.h"

namespace fp4moe {

Result<DecoderLayer> load_gpt_oss_layer(WeightLoader& loader, int64_t layer) {
  const std::string attention = layer_prefix(layer) + "self_attn.";
  const bool bias = loader.config().attention_bias;
  DecoderLayer out;
  FP4MOE_RETURN_IF_ERROR(load_norms(loader, layer, out));
  FP4MOE_ASSIGN_OR_RETURN(out.attention, load_gqa(loader, attention, {.layer = layer, .sinks = true}));
  FP4MOE_ASSIGN_OR_RETURN(out.attention_out,
                          load_attention_out(loader, layer, out.attention->out_cols(), bias));
  FP4MOE_ASSIGN_OR_RETURN(out.moe, load_moe(loader, layer,
                                            {.scoring = RouterScoring::kTopkSoftmax,
                                             .router = "mlp.router",
                                             .router_bias = "mlp.router.bias"}));
  return out;
}

}  // namespace fp4moe
