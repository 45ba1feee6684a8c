// Layer loaders, one per family, and the choice among them.
#pragma once

#include "model/decoder.h"

namespace fp4moe {

// gpt_oss: each layer has grouped-query attention with sinks and alternating windows, then a top-k softmax
// MoE.
Result<DecoderLayer> load_gpt_oss_layer(WeightLoader& loader, int64_t layer);

// deepseek_v3, kimi_k2, kimi_k25 and glm4_moe_lite: latent attention; the first layers have a dense MLP, the
// others a MoE with a shared expert and group-limited sigmoid routing.
Result<DecoderLayer> load_deepseek_v3_layer(WeightLoader& loader, int64_t layer);

// glm4_moe: grouped-query attention that rotates a part of each head, and DeepSeek's feed-forward.
Result<DecoderLayer> load_glm4_moe_layer(WeightLoader& loader, int64_t layer);

// qwen2_moe, qwen3_moe and qwen3_vl_moe's text model: grouped-query attention (Qwen2: biases of q, k and v;
// Qwen3: QK norms); MoE layers (Qwen2: with a gated shared expert), and dense MLPs in the layers without
// experts.
Result<DecoderLayer> load_qwen2_moe_layer(WeightLoader& loader, int64_t layer);
Result<DecoderLayer> load_qwen3_moe_layer(WeightLoader& loader, int64_t layer);

// qwen3_next and qwen3_5_moe: gated delta nets, and grouped-query attention with an output gate and QK norms;
// MoE with a gated shared expert.
Result<DecoderLayer> load_qwen3_next_layer(WeightLoader& loader, int64_t layer);

LayerLoader layer_loader(ModelFamily family);

}  // namespace fp4moe
