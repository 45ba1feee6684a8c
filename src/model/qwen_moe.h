// qwen2_moe and qwen3_moe: grouped-query attention (Qwen2: biases of q, k and v; Qwen3: QK norms); MoE layers
// (Qwen2: with a gated shared expert), and dense MLPs in the layers without experts.
#pragma once

#include "model/decoder.h"

namespace fp4moe {

Result<DecoderLayer> load_qwen2_moe_layer(WeightLoader& loader, int64_t layer);
Result<DecoderLayer> load_qwen3_moe_layer(WeightLoader& loader, int64_t layer);

}  // namespace fp4moe
