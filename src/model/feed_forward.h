// The feed-forward part of a layer, this rank's share: a MoE with or without a shared expert, or a dense MLP.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "moe/dense_mlp.h"
#include "moe/moe_layer.h"

namespace fp4moe {

class WeightLoader;

// Where a family keeps a MoE's tensors, below the layer's prefix; null: it has none.
struct MoeNames {
  RouterScoring scoring = RouterScoring::kTopkSoftmax;
  const char* router = nullptr;         // "<router>.weight" [E, H]
  const char* router_bias = nullptr;    // [E]
  const char* shared_expert = nullptr;  // "<shared_expert>.gate_proj" and so on
  const char* shared_gate = nullptr;    // [1, H]
};

// Groups, normalisation, scaling factor and correction bias ("<router>.e_score_correction_bias") are the
// config's.
Result<std::unique_ptr<MoeLayer>> load_moe(WeightLoader& loader, int64_t layer, const MoeNames& names);

// "mlp.gate_proj" and so on, the group's ranks sharing its I; deterministic ranks have all of it, for some of
// the group's rows.
Result<std::unique_ptr<DenseMlp>> load_dense_mlp(WeightLoader& loader, int64_t layer);

}  // namespace fp4moe
