// Layers for multi-token prediction: in the checkpoint, declared, and not used.
#pragma once

#include <string>
#include <string_view>

#include "io/checkpoint.h"
#include "io/model_config.h"

namespace fp4moe {

// Whether a tensor or module of this name belongs to them: "mtp.*", "model.mtp.*", and "model.layers.N.*"
// with N >= num_layers.
bool is_mtp_name(const ModelConfig& config, std::string_view name);

// What is skipped, for the log: "skipping 9 tensors (1234 bytes) of multi-token prediction, from
// 'model.layers.61.eh_proj.weight'"; empty if the checkpoint has none.
std::string describe_skipped_mtp(const ModelConfig& config, const Checkpoint& checkpoint);

}  // namespace fp4moe
