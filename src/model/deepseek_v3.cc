#include "model/families.h"
#include "model/layer_parts.h"

namespace fp4moe {

Result<DecoderLayer> load_deepseek_v3_layer(WeightLoader& loader, int64_t layer) {
  return load_mla_layer(loader, layer, kGroupedSigmoidMoe);
}

}  // namespace fp4moe
