// The multi-token prediction layer that follows a target's last layer, as its draft model.
//
// Row t takes the token after the one whose features it continues: with token x_{p+1} and the target's hidden
// state h_p after its final norm,
//
//   h = layer(eh_proj [norm(embed(x_{p+1}), enorm) ; norm(h_p, hnorm)])     at position p
//
// logits = lm_head norm(h, shared_head.norm). A chained row takes norm(h, shared_head.norm) of the head's
// last pass as h_p. The embedding and the LM head are the target's; the checkpoint's copies of them are not
// read. The layer of a model with states attends. Families that store the layer below "mtp." have other names
// for these tensors (io/config/tensor_names.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "model/model.h"

namespace fp4moe {

// Returns the configuration of the draft model: the target's with one layer, which has experts.
ModelConfig mtp_config(const ModelConfig& target);

// Whether the MTP layer's experts are bf16, as the whole layer is in most FP4 exports; else they are in the
// other layers' format. Decided by the tensors in `folder` or, if it has no weights, by the quantization
// declaration, which may forget the layer. Errors are those of Checkpoint::open().
Result<bool> has_bf16_mtp_experts(const ModelConfig& target, const std::string& folder);

// kUnsupported unless config.json declares one layer, or may leave it undeclared.
Status check_mtp_layer(const ModelConfig& target);
// Also unless the checkpoint has the tensors "model.layers.N." with N = num_hidden_layers.
Status check_mtp_layer(const Checkpoint& checkpoint, const ModelConfig& target);

// Loads the target's MTP layer. options.moe_plan has the format of its experts, and options.max_logit_rows is
// at most the target's. `target`: loaded with FeatureOptions::is_final_norm alone, outlives the result. The
// model keeps the final norm of its own rows as features().
Result<std::unique_ptr<Model>> load_mtp_head(const Checkpoint& checkpoint, const ModelOptions& options,
                                             const Model& target, ThreadPool& pool,
                                             const ProgressSink& progress);

}  // namespace fp4moe
