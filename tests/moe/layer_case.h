// Random experts and router, as a checkpoint would hold them, for the tests of runners and layers.
#pragma once

#include <memory>
#include <vector>

#include "kernels/expert_case.h"
#include "moe/moe_layer.h"
#include "moe/table.h"

namespace fp4moe {

struct LayerSize {
  int64_t hidden = 0, intermediate = 0, num_experts = 0, top_k = 0;
};

// Gate and up biases are interleaved; every half of every expert has its own tensor and input scales.
class ExpertsCase {
 public:
  ExpertsCase(const LayerSize& size, Fp4Format format, ActivationKind kind, uint64_t seed = 1)
      : random(seed) {
    problem = {size.hidden, size.intermediate, size.num_experts, size.top_k, format, {kind}};
    weights = {format, size.hidden, size.intermediate, {}};
    for (int64_t e = 0; e < size.num_experts; ++e) {
      ExpertWeightsView w;
      if (is_gated(kind)) w.gate = matrix(size.intermediate, size.hidden);
      w.up = matrix(size.intermediate, size.hidden);
      w.down = matrix(size.hidden, size.intermediate);
      w.gate_bias = bias(2 * size.intermediate);
      w.up_bias = w.gate_bias + 1;
      w.gate_up_bias_stride = 2;
      if (e % 2 == 0) w.down_bias = bias(size.hidden);
      w.gate_input_scale = input_scale(4.5f);
      w.up_input_scale = input_scale(4.5f);
      w.down_input_scale = input_scale(3.0f);
      weights.experts.push_back(w);
    }
  }

  // Rows of values that bf16 holds, so that both activation types see the same.
  std::vector<float> tokens(int64_t n) { return to_float(to_bf16(random.normal(n * problem.hidden_size))); }

  Random random;
  MoeProblem problem;
  MoeWeightsView weights;

 private:
  Fp4MatrixView matrix(int64_t rows, int64_t cols) {
    matrices_.push_back(std::make_unique<Fp4Matrix>(problem.format, rows, cols, random));
    Fp4MatrixView view = matrices_.back()->view();
    if (problem.format == Fp4Format::kNvfp4)
      view.tensor_scale *= 0.5f + 0.01f * static_cast<float>(random.integer(0, 100));
    return view;
  }
  const bf16* bias(int64_t n) {
    biases_.push_back(std::make_unique<std::vector<bf16>>(to_bf16(random.normal(n, 0.2f))));
    return biases_.back()->data();
  }
  // As if calibrated on values up to about `amax`.
  float input_scale(float amax) {
    return amax / 2688 * (0.7f + 0.01f * static_cast<float>(random.integer(0, 70)));
  }

  std::vector<std::unique_ptr<Fp4Matrix>> matrices_;
  std::vector<std::unique_ptr<std::vector<bf16>>> biases_;
};

}  // namespace fp4moe
