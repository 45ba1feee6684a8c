#include "model/gpt_oss.h"

#include "base/check.h"
#include "io/expert_weights.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

Result<std::unique_ptr<MoeLayer>> load_moe(WeightLoader& loader, int64_t layer) {
  const ModelConfig& config = loader.config();
  const std::string router = layer_prefix(layer) + "mlp.router";
  FP4MOE_ASSIGN_OR_RETURN(
      const TensorView weight,
      loader.checkpoint().get(router + ".weight", DType::kBF16, {config.num_experts, config.hidden_size}));
  RouterWeights weights{.scoring = RouterScoring::kTopkSoftmax, .weight = weight.as<bf16>()};
  FP4MOE_ASSIGN_OR_RETURN(weights.bias, loader.vector(router + ".bias", config.num_experts));
  FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView experts,
                          load_expert_weights(loader.checkpoint(), config, layer));
  return MoeLayer::make(loader.moe_plan(), loader.ops(), weights, experts, nullptr, loader.pool());
}

}  // namespace

Result<DecoderLayer> load_gpt_oss_layer(WeightLoader& loader, int64_t layer) {
  const ModelConfig& config = loader.config();
  const std::string attention = layer_prefix(layer) + "self_attn.";
  DecoderLayer out;
  FP4MOE_RETURN_IF_ERROR(load_norms(loader, layer, out));
  FP4MOE_ASSIGN_OR_RETURN(out.attention, load_gqa(loader, attention, {.layer = layer, .sinks = true}));
  FP4MOE_ASSIGN_OR_RETURN(
      out.attention_out, load_attention_out(loader, layer, out.attention->out_cols(), config.attention_bias));
  FP4MOE_ASSIGN_OR_RETURN(out.moe, load_moe(loader, layer));
  return out;
}

}  // namespace fp4moe
