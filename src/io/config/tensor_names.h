// Names of tensors and modules of checkpoints whose text model is part of a larger model: the only place that
// knows the prefixes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fp4moe {

// Returns a name of the text model without the larger model's prefix: "language_model.model.norm.weight",
// "language_model.norm.weight" and "model.language_model.norm.weight" are "model.norm.weight", and
// "language_model.lm_head.weight" is "lm_head.weight". Returns other names unchanged. Also for patterns.
std::string text_model_name(std::string_view stored);

// Returns the name of a tensor or module of an MTP layer that is stored below "mtp." as if it were stored as
// layer `layer` of the model: "mtp.layers.0.mlp.gate" is "model.layers.40.mlp.gate", and "mtp.fc",
// "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden" and "mtp.norm" are "eh_proj", "enorm", "hnorm" and
// "shared_head.norm" there. Returns other names unchanged. `layer`: the number after the model's last layer.
std::string mtp_layer_name(std::string_view stored, int64_t layer);

// Returns the name under which a published checkpoint stores a tensor or module of the text model. `prefix`
// is ModelConfig::text_prefix: "", "language_model." or "model.language_model."; `mtp_layer` is
// ModelConfig::mtp_layer.
std::string stored_name(std::string_view prefix, std::string_view name, int64_t mtp_layer = -1);

// Whether a tensor, module or pattern belongs to a vision model: "vision_tower.*", "mm_projector.*" and
// "visual.*", with or without "model." in front.
bool is_vision_name(std::string_view name);

// Returns the vision modules that a published checkpoint stores beside a text model with this prefix
// (ModelConfig::text_prefix); empty for a checkpoint of a text model.
std::vector<std::string> vision_modules(std::string_view text_prefix);

}  // namespace fp4moe
