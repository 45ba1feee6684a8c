// Loads experts stored in one tensor per projection, and unquantised ones. Only for .cc files in this folder.
#pragma once

#include <string>

#include "io/checkpoint/expert_weights.h"

namespace fp4moe {

// Loads gpt-oss experts: "<prefix>gate_up_proj_blocks" [E, 2I, H / 32, 16], _scales and _bias, with gate and
// up rows alternating, and "<prefix>down_proj_*". `prefix` ends in "experts.".
Result<MoeWeightsView> load_gpt_oss_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                            const std::string& prefix, ExpertRange local, ThreadPool* pool);
// Loads ModelOpt experts: "<prefix>gate_up_proj.weight" [E, 2I, H / 2], gate rows first, .weight_scale
// [E, 2I, H / 16], .weight_scale_2 and optionally .input_scale with shape [], [1], [E], [E, 1] or [E, 2]
// (gate, up); "<prefix>down_proj.*" likewise.
Result<MoeWeightsView> load_fused_modelopt_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                                   const std::string& prefix, ExpertRange local,
                                                   ThreadPool* pool);

// Whether the checkpoint stores a bf16 projection of all experts in one tensor: "<prefix>gate_up_proj" and
// "<prefix>down_proj".
bool has_fused_bf16_experts(const Checkpoint& checkpoint, const std::string& prefix);
// Loads unquantised experts, which are bf16.
// * gpt-oss: "<prefix>gate_up_proj" [E, H, 2 I], gate and up columns alternating, and "<prefix>down_proj"
//   [E, I, H], each with a "_bias".
// * Other families, fused (Qwen3-VL): the same two tensors without biases, gate columns first; or, as
//   transformers 5 saves them, [E, 2 I, H], gate rows first, and [E, H, I]. kInvalidArgument names both
//   tensors, their shapes and the two legal pairs of shapes.
// * Other families: "<prefix><e>." with "gate_proj.weight" and "up_proj.weight" [I, H] and "down_proj.weight"
//   [H, I].
// Other errors are those of Checkpoint::get().
Result<MoeWeightsView> load_bf16_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const std::string& prefix);

}  // namespace fp4moe
