// Random experts and router in a checkpoint's form, for tests of runners and layers.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/expert_case.h"
#include "moe/moe_layer.h"
#include "moe/table.h"

namespace fp4moe {

constexpr Fp4Format kExpertFormats[] = {Fp4Format::kMxfp4, Fp4Format::kNvfp4, Fp4Format::kNone};

struct LayerSize {
  int64_t hidden = 0, intermediate = 0, num_experts = 0, top_k = 0;
};

// Experts with interleaved gate and up biases and separate tensor and input scales for gate, up and down.
// With kNone the experts are bf16, every second matrix is transposed, and `weights` also holds the same
// values as MXFP4 for the oracles.
class ExpertsCase {
 public:
  ExpertsCase(const LayerSize& size, Fp4Format format, ActivationKind kind, uint64_t seed = 1)
      : random(seed), held_(format == Fp4Format::kNone ? Fp4Format::kMxfp4 : format) {
    problem = {size.hidden, size.intermediate, size.num_experts, size.top_k, format, {kind}};
    weights = {format, size.hidden, size.intermediate, {}, {}};
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
      if (format == Fp4Format::kNone)
        weights.bf16_experts.push_back({as_bf16(w.gate), as_bf16(w.up), as_bf16(w.down), w.gate_bias,
                                        w.up_bias, w.down_bias, w.gate_up_bias_stride});
    }
  }

  // Returns rows of values that bf16 represents exactly, so that both activation types see the same values.
  std::vector<float> tokens(int64_t n) { return to_float(to_bf16(random.normal(n * problem.hidden_size))); }

  Random random;
  MoeProblem problem;
  MoeWeightsView weights;

 private:
  Fp4MatrixView matrix(int64_t rows, int64_t cols) {
    matrices_.push_back(std::make_unique<Fp4Matrix>(held_, rows, cols, random));
    Fp4MatrixView view = matrices_.back()->view();
    if (held_ == Fp4Format::kNvfp4)
      view.tensor_scale *= 0.5f + 0.01f * static_cast<float>(random.integer(0, 100));
    return view;
  }
  const bf16* bias(int64_t n) {
    biases_.push_back(std::make_unique<std::vector<bf16>>(to_bf16(random.normal(n, 0.2f))));
    return biases_.back()->data();
  }
  Bf16MatrixView as_bf16(const Fp4MatrixView& m) {
    const bool transposed = biases_.size() % 2 == 0;
    std::vector<bf16> values(static_cast<size_t>(m.rows * m.cols));
    const int64_t row_stride = transposed ? 1 : m.cols, col_stride = transposed ? m.rows : 1;
    for (int64_t r = 0; r < m.rows; ++r)
      for (int64_t c = 0; c < m.cols; ++c)
        values[static_cast<size_t>(r * row_stride + c * col_stride)] = float_to_bf16(fp4_at(m, r, c));
    biases_.push_back(std::make_unique<std::vector<bf16>>(std::move(values)));
    return {m.rows, m.cols, biases_.back()->data(), row_stride, col_stride};
  }
  // Returns an input scale as if calibrated on values up to about `amax`.
  float input_scale(float amax) {
    return amax / 2688 * (0.7f + 0.01f * static_cast<float>(random.integer(0, 70)));
  }

  const Fp4Format held_;
  std::vector<std::unique_ptr<Fp4Matrix>> matrices_;
  std::vector<std::unique_ptr<std::vector<bf16>>> biases_;  // also the bf16 matrices
};

// Experts with a router.
class LayerCase : public ExpertsCase {
 public:
  LayerCase(const LayerSize& size, Fp4Format format, ActivationKind kind) : ExpertsCase(size, format, kind) {
    router_weight_ = to_bf16(random.normal(size.num_experts * size.hidden, 0.2f));
    router.weight = router_weight_.data();
  }

  // Returns values that bf16 does not represent exactly: the router sees them, the experts see them rounded.
  std::vector<float> tokens(int64_t n) { return random.normal(n * problem.hidden_size); }

  // Returns the initial residual: a ramp.
  std::vector<float> ramp(int64_t n) const {
    std::vector<float> residual;
    for (int64_t i = 0; i < n * problem.hidden_size; ++i)
      residual.push_back(0.001f * static_cast<float>(i % problem.hidden_size));
    return residual;
  }

  std::unique_ptr<MoeLayer> make(const char* runner, DType dtype, ThreadPool& pool) const {
    MoeProblem p = problem;
    p.act_dtype = dtype;
    const Result<MoePlan> plan = plan_moe(p, {.runner = runner});
    EXPECT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_STREQ(plan->runner()->name, runner);
    auto layer = MoeLayer::make(*plan, ref_dense_ops(), router, weights, nullptr, pool);
    EXPECT_TRUE(layer.ok()) << layer.status().to_string();
    return std::move(*layer);
  }

  // Computes residual + layer(x). The residual is a ramp so that a missing addition is detected.
  std::vector<float> run(const MoeLayer& layer, DType dtype, const std::vector<float>& x,
                         ThreadPool& pool) const {
    const int64_t tokens = static_cast<int64_t>(x.size()) / problem.hidden_size;
    ActBuffer act(dtype, tokens, problem.hidden_size, x);
    std::vector<float> residual = ramp(tokens);
    MoeProblem p = problem;
    p.act_dtype = dtype;
    const auto transport = std::move(*make_transport(*plan_moe(p, {}), {.max_group_rows = tokens}));
    Arena scratch = std::move(*Arena::make(layer.scratch_bytes(tokens, *transport)));
    EXPECT_TRUE(
        layer
            .forward_moe({0, act.view(), x.data(), residual.data(), nullptr, counters, nullptr, expert_ids},
                         *transport, scratch, pool)
            .ok());
    return residual;
  }

  std::vector<float> run(const char* runner, DType dtype, const std::vector<float>& x,
                         int threads = 2) const {
    ThreadPool pool(threads);
    return run(*make(runner, dtype, pool), dtype, x, pool);
  }

  RouterWeights router;
  ExpertCounters* counters = nullptr;  // of layer 0
  int32_t* expert_ids = nullptr;       // [T, K]

 private:
  std::vector<bf16> router_weight_;
};

}  // namespace fp4moe
