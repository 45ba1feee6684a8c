// The experts of an unquantised layer. Only for the .cc files of this folder.
#pragma once

#include <string>

#include "io/checkpoint/expert_weights.h"

namespace fp4moe {

// gpt-oss: "<prefix>gate_up_proj" [E, H, 2 I] (gate and up columns alternate) and "<prefix>down_proj" [E, I,
// H], each with a "_bias"; other families: "<prefix><e>.gate_proj.weight" and "up_proj" [I, H], "down_proj"
// [H, I]. All are bf16. Errors as Checkpoint::get().
Result<MoeWeightsView> load_bf16_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const std::string& prefix);

}  // namespace fp4moe
