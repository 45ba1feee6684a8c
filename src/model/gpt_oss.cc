#include "model/families.h"
#include "model/layer_parts.h"

namespace fp4moe {

Result<DecoderLayer> load_gpt_oss_layer(WeightLoader& loader, int64_t layer) {
  return load_gqa_layer(
      loader, {.layer = layer, .sinks = true},
      {.scoring = RouterScoring::kTopkSoftmax, .router = "mlp.router", .router_bias = "mlp.router.bias"});
}

}  // namespace fp4moe
