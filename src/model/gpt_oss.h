// gpt_oss: grouped-query attention with sinks and alternating windows, then a top-k softmax MoE, per layer.
#pragma once

#include "model/decoder.h"

namespace fp4moe {

Result<DecoderLayer> load_gpt_oss_layer(WeightLoader& loader, int64_t layer);

}  // namespace fp4moe
