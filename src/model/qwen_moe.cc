#include "model/families.h"
#include "model/layer_parts.h"

namespace fp4moe {

Result<DecoderLayer> load_qwen2_moe_layer(WeightLoader& loader, int64_t layer) {
  return load_gqa_layer(loader, {.layer = layer},
                        {.scoring = RouterScoring::kSoftmaxTopk,
                         .router = "mlp.gate",
                         .shared_expert = "mlp.shared_expert",
                         .shared_gate = "mlp.shared_expert_gate.weight"});
}

Result<DecoderLayer> load_qwen3_moe_layer(WeightLoader& loader, int64_t layer) {
  return load_gqa_layer(loader, {.layer = layer},
                        {.scoring = RouterScoring::kSoftmaxTopk, .router = "mlp.gate"});
}

}  // namespace fp4moe
