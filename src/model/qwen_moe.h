// qwen2_moe and qwen3_moe: grouped-query attention (Qwen2: biases of q, k and v; Qwen3: QK norms), layers
// with experts every so often (Qwen2: a gated shared expert beside them), dense MLPs elsewhere.
#pragma once

#include "model/decoder.h"

namespace fp4moe {

Result<DecoderLayer> load_qwen2_moe_layer(WeightLoader& loader, int64_t layer);
Result<DecoderLayer> load_qwen3_moe_layer(WeightLoader& loader, int64_t layer);

}  // namespace fp4moe
