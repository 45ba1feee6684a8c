#include "model/families.h"
#include "model/layer_parts.h"

namespace fp4moe {

Result<DecoderLayer> load_glm4_moe_layer(WeightLoader& loader, int64_t layer) {
  return load_gqa_layer(loader, {.layer = layer}, kGroupedSigmoidMoe);
}

}  // namespace fp4moe
