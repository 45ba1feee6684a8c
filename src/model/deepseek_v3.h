// deepseek_v3: latent attention, first layers with a dense MLP, then MoE layers with a shared expert and
// group-limited sigmoid routing.
#pragma once

#include "model/decoder.h"

namespace fp4moe {

Result<DecoderLayer> load_deepseek_v3_layer(WeightLoader& loader, int64_t layer);

}  // namespace fp4moe
