// The multi-token prediction layer that follows a target's last layer, as its draft model.
//
// Row t takes the token after the one whose features it continues: with token x_{p+1} and the target's hidden
// state h_p after its final norm,
//
//   h = layer(eh_proj [norm(embed(x_{p+1}), enorm) ; norm(h_p, hnorm)])     at position p
//
// logits = lm_head norm(h, shared_head.norm). A chained row takes norm(h, shared_head.norm) of the head's
// last pass as h_p. The embedding and the LM head are the target's; the checkpoint's copies of them are not
// read.
#pragma once

#include <cstdint>
#include <memory>

#include "model/model.h"

namespace fp4moe {

// Returns the configuration of the draft model: the target's with one layer, which has experts.
ModelConfig mtp_config(const ModelConfig& target);

// kUnsupported, with what the checkpoint has and needs, unless it has exactly one MTP layer: declared by
// config.json's num_nextn_predict_layers and with tensors "model.layers.N." with N = num_hidden_layers.
Status check_mtp_layer(const Checkpoint& checkpoint, const ModelConfig& target);

// Loads the target's MTP layer, whose experts are in the checkpoint's FP4 format or bf16. `options` are the
// target's with the draft model's limits; `target`: loaded with FeatureOptions::is_final_norm alone, outlives
// the result. The model keeps the final norm of its own rows as features().
Result<std::unique_ptr<Model>> load_mtp_head(const Checkpoint& checkpoint, const ModelOptions& options,
                                             const Model& target, ThreadPool& pool,
                                             const ProgressSink& progress);

}  // namespace fp4moe
