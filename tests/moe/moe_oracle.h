// Oracle of the MoE layer: plain double loops over dequantised weights and over activations after a
// quantisation round trip, written from the formats' definitions. It shares only types with src/.
#pragma once

#include <cstdint>
#include <vector>

#include "io/checkpoint/expert_weights.h"
#include "moe/plan/plan.h"

namespace fp4moe {

struct OracleLayer {
  const MoeWeightsView* weights = nullptr;  // all E experts, not sharded
  Activation activation;
  Numerics numerics;
  DType act_dtype = DType::kBF16;
  // Deliberate errors, which a test must detect.
  bool skip_input_quantisation = false, skip_intermediate_quantisation = false;
};

// x [T, H] holds values of act_dtype; ids and weights are [T, K]. Returns [T, H] = sum over k of weight *
// expert(x). Slots whose id is not an expert are dropped.
std::vector<double> oracle_moe(const OracleLayer& layer, const std::vector<float>& x,
                               const std::vector<int32_t>& ids, const std::vector<float>& weights);

// Runs one expert on one row x [H]; returns [H], including the down bias.
std::vector<double> oracle_expert(const OracleLayer& layer, int64_t expert, const std::vector<float>& x);

// Returns x as the scheme's first GEMM sees it: quantised in the format's blocks of 16 or 32, and
// dequantised.
std::vector<double> oracle_quantised(const OracleLayer& layer, const std::vector<float>& x,
                                     float static_scale, ActScaleChoice choice);

}  // namespace fp4moe
