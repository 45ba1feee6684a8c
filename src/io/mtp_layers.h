// Layers for multi-token prediction: in the checkpoint, declared, and not used.
#pragma once

#include <string>
#include <string_view>

#include "io/checkpoint.h"
#include "io/model_config.h"

namespace fp4moe {

// Whether a module pattern of a quantization declaration belongs to them: "mtp.*", "model.mtp.*", and
// "model.layers.N.*" with N >= num_layers.
bool is_mtp_name(const ModelConfig& config, std::string_view name);

// Whether a tensor belongs to them: "mtp.*", "model.mtp.*", and of DeepSeek "model.layers.N.*" with N >=
// num_layers where the checkpoint has layer N's "eh_proj", which joins a token's embedding to the hidden
// state and is part of no other layer. A layer without it is one that num_hidden_layers does not count.
bool is_mtp_tensor(const ModelConfig& config, const Checkpoint& checkpoint, std::string_view name);

// The skipped tensors, for the log: "skipping 9 tensors (1234 bytes) of multi-token prediction, from
// 'model.layers.61.eh_proj.weight'"; empty if the checkpoint has none.
std::string describe_skipped_mtp(const ModelConfig& config, const Checkpoint& checkpoint);

}  // namespace fp4moe
