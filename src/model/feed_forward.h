// Loads this rank's part of a layer's feed-forward: a MoE with or without a shared expert, or a dense MLP.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "moe/dense_mlp.h"
#include "moe/moe_layer.h"

namespace fp4moe {

class WeightLoader;

// A family's names for a MoE's tensors, relative to the layer's prefix; null: the family has no such tensor.
struct MoeNames {
  RouterScoring scoring = RouterScoring::kTopkSoftmax;
  const char* router = nullptr;         // "<router>.weight" [E, H]
  const char* router_bias = nullptr;    // [E]
  const char* shared_expert = nullptr;  // "<shared_expert>.gate_proj" and so on
  const char* shared_gate = nullptr;    // [1, H]
};

// Loads a layer's MoE. Groups, normalisation, scaling factor and the presence of a correction bias
// ("<router>.e_score_correction_bias") come from the config.
Result<std::unique_ptr<MoeLayer>> load_moe(WeightLoader& loader, int64_t layer, const MoeNames& names);

// Loads "mlp.gate_proj" and so on, sharded along I among the group's ranks. If deterministic, each rank has
// the whole MLP, and runs it for some of the group's rows.
Result<std::unique_ptr<DenseMlp>> load_dense_mlp(WeightLoader& loader, int64_t layer);

}  // namespace fp4moe
