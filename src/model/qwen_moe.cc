#include "model/families.h"
#include "model/layer_parts.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

constexpr MoeNames kGatedSharedMoe = {.scoring = RouterScoring::kSoftmaxTopk,
                                      .router = "mlp.gate",
                                      .shared_expert = "mlp.shared_expert",
                                      .shared_gate = "mlp.shared_expert_gate.weight"};

}  // namespace

Result<DecoderLayer> load_qwen2_moe_layer(WeightLoader& loader, int64_t layer) {
  return load_gqa_layer(loader, {.layer = layer}, kGatedSharedMoe);
}

Result<DecoderLayer> load_qwen3_moe_layer(WeightLoader& loader, int64_t layer) {
  return load_gqa_layer(loader, {.layer = layer},
                        {.scoring = RouterScoring::kSoftmaxTopk, .router = "mlp.gate"});
}

Result<DecoderLayer> load_qwen3_next_layer(WeightLoader& loader, int64_t layer) {
  return loader.config().has_state(layer) ? load_delta_layer(loader, layer, kGatedSharedMoe)
                                          : load_gqa_layer(loader, {.layer = layer}, kGatedSharedMoe);
}

}  // namespace fp4moe
