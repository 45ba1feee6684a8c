// Converts a checkpoint's scales to the scales of quantisers and GEMMs. No other code does this, so an
// activation scale and the alpha that undoes it always match.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/tensor_scale.h"
#include "io/checkpoint/expert_weights.h"
#include "moe/plan/rank_layout.h"
#include "moe/plan/scheme.h"

namespace fp4moe {

// Scales of one expert on this rank. With kPerToken, w4a16 or w4a8, the activation scales are 1 and the
// alphas are the weights' tensor scales.
struct ExpertScales {
  EncodeScale a1, a2;                // for quantising x and the intermediate
  float gate = 1, up = 1, down = 1;  // alphas: weight tensor scale * activation decode scale
};

// `experts`: all E experts of the layer, unsharded, on every rank, because a scalar scale is the maximum over
// all of them. Returns the scales of experts [local.first, local.first + local.count).
std::vector<ExpertScales> resolve_scales(const std::vector<ExpertWeightsView>& experts,
                                         const Numerics& numerics, Shard local);

}  // namespace fp4moe
