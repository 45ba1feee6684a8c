// An EAGLE-3 head as a draft model: a few layers of a small decoder that continue a target's residuals.
//
// Row t takes the token after the one whose features it continues: with token x_{p+1} and the target's
// features f_p (Eagle3Config::after_layers),
//
//   h   = fc f_p               with the norms of norm_before_fc or fc_norm
//                              a chained row: h is the head's own output
//   res = h                    norm_before_residual: norm(h, hidden_norm)
//   in  = [norm(embed(x_{p+1}), input_layernorm) ; norm(h, hidden_norm)]
//   res = res + attention(in)  at position p
//   res = res + mlp(norm(res, post_attention_layernorm))
//
// and further plain layers, if any.
//
// logits = lm_head norm(res, norm), and the output for chained rows is res (norm_output: the normed rows).
// The embedding and the LM head are the target's if the checkpoint has none. A group of ranks shares the
// layers as it does the target's; fc and the embedding are on every rank.
#pragma once

#include <memory>

#include "io/config/eagle3_config.h"
#include "model/model.h"

namespace fp4moe {

// Returns what the target must keep for the head.
FeatureOptions eagle3_features(const Eagle3Config& config);

// Loads the head. `options` are the target's with the draft model's limits; `target`: loaded with
// eagle3_features(), outlives the result. The model keeps the output of its own rows as features().
Result<std::unique_ptr<Model>> load_eagle3_head(const Checkpoint& checkpoint, const Eagle3Config& config,
                                                const ModelOptions& options, const Model& target,
                                                ThreadPool& pool, const ProgressSink& progress);

}  // namespace fp4moe
