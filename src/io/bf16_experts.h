// The experts of a layer that was not quantised. Only for the .cc files of this folder.
#pragma once

#include <string>

#include "io/expert_weights.h"

namespace fp4moe {

// gpt-oss: "<prefix>gate_up_proj" [E, H, 2 I] (gate and up columns alternate) and "<prefix>down_proj"
// [E, I, H], with "_bias" each; else "<prefix><e>.gate_proj.weight" [I, H], "up_proj" and "down_proj" [H, I].
// All bf16; checked as other tensors are.
Result<MoeWeightsView> load_bf16_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const std::string& prefix);

}  // namespace fp4moe
