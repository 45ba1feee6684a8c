// deepseek_v3: latent attention; the first layers have a dense MLP, the others a MoE with a shared expert and
// group-limited sigmoid routing.
#pragma once

#include "model/decoder.h"

namespace fp4moe {

Result<DecoderLayer> load_deepseek_v3_layer(WeightLoader& loader, int64_t layer);

}  // namespace fp4moe
