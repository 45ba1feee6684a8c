#include "moe/act_scales.h"

#include <algorithm>

namespace fp4moe {
namespace {

// The input scale (decode direction) of gate and up, which read the same rows and therefore share one.
float input_scale(const ExpertWeightsView& w) {
  return w.gate.rows == 0 ? w.up_input_scale : std::max(w.gate_input_scale, w.up_input_scale);
}

float choose(ActScaleChoice choice, float largest, float own) {
  if (choice == ActScaleChoice::kPerToken) return 1;
  return choice == ActScaleChoice::kScalar ? largest : own;
}

}  // namespace

std::vector<ExpertScales> resolve_scales(const std::vector<ExpertWeightsView>& experts,
                                         const Numerics& numerics, Shard local) {
  const bool quantised = numerics.scheme == Scheme::kW4A4;
  float largest1 = 0, largest2 = 0;
  for (const ExpertWeightsView& w : experts) {
    largest1 = std::max(largest1, input_scale(w));
    largest2 = std::max(largest2, w.down_input_scale);
  }
  std::vector<ExpertScales> scales;
  for (int64_t e = local.first; e < local.first + local.count; ++e) {
    const ExpertWeightsView& w = experts[static_cast<size_t>(e)];
    const DecodeScale a1 = {quantised ? choose(numerics.a1, largest1, input_scale(w)) : 1};
    const DecodeScale a2 = {quantised ? choose(numerics.a2, largest2, w.down_input_scale) : 1};
    scales.push_back({to_encode(a1), to_encode(a2), w.gate.tensor_scale * a1.value,
                      w.up.tensor_scale * a1.value, w.down.tensor_scale * a2.value});
  }
  return scales;
}

}  // namespace fp4moe
