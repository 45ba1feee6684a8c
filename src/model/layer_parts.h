// Loads the layers that several families share: norms, attention, output projection, and a MoE or a dense
// MLP.
#pragma once

#include "model/attention.h"
#include "model/decoder.h"
#include "model/feed_forward.h"

namespace fp4moe {

// Sigmoid scores, a choice limited to the best groups of experts, and shared experts (DeepSeek, Kimi, GLM).
inline constexpr MoeNames kGroupedSigmoidMoe = {
    .scoring = RouterScoring::kSigmoidGrouped, .router = "mlp.gate", .shared_expert = "mlp.shared_experts"};

// A layer with grouped-query attention. Layers without experts have a dense MLP.
Result<DecoderLayer> load_gqa_layer(WeightLoader& loader, const GqaOptions& options, const MoeNames& moe);
// A layer with latent attention, likewise.
Result<DecoderLayer> load_mla_layer(WeightLoader& loader, int64_t layer, const MoeNames& moe);
// A layer with a gated delta net, likewise.
Result<DecoderLayer> load_delta_layer(WeightLoader& loader, int64_t layer, const MoeNames& moe);

}  // namespace fp4moe
