// A down projection and a gate/up projection for the expert GEMM tests, with expected values and error
// bounds.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/expert_case.h"

namespace fp4moe {

inline constexpr Activation kSwigluOai = {ActivationKind::kSwigluOai};
inline constexpr Activation kSwigluOther = {ActivationKind::kSwigluOai, 1.1f, 0.25f, 3.0f};
inline constexpr Activation kSilu = {ActivationKind::kSilu};
inline constexpr Activation kRelu2 = {ActivationKind::kRelu2};

inline std::vector<double> to_double(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// Options of one GEMM call: the scales of its rows (null if absent), and how gate_up() runs.
struct GemmCall {
  const float* block_scales = nullptr;
  const int32_t* block_starts = nullptr;
  const float* row_scales = nullptr;
  float tensor_scale = 1;  // of the rows; multiplied by the weight's tensor scale
  bool swapped = false;    // exchanges gate and up; the result must be wrong
  DType out_dtype = DType::kBF16;
};

// One down projection [n, k] with a bias.
struct DownCase {
  DownCase(Fp4Format format, int64_t n, int64_t k, Random& random)
      : weight(format, n, k, random), bias(random.normal(n, 0.1f)) {}

  std::vector<float> run(const ExpertOps& ops, const ActRows& x, const GemmCall& call = {}) const {
    const Fp4MatrixView w = weight.view();
    const Buffer panels = pack_groups(ops, nullptr, w);
    std::vector<float> out(static_cast<size_t>(x.rows * w.rows), NAN);
    ops.down({.gemm = {w.format, x, panels.data(), bias.data(), w.rows / kPanelRows, w.rows,
                       call.block_scales, call.block_starts, call.row_scales},
              .scale = w.tensor_scale * call.tensor_scale,
              .out = out.data()});
    return out;
  }

  // Computes the expected values in double and the error bound of an f32 kernel. The rows x include all their
  // scales.
  void expect(const std::vector<double>& x, std::vector<float>& values, std::vector<float>& budget) const {
    const Fp4MatrixView w = weight.view();
    for (int64_t t = 0; t < static_cast<int64_t>(x.size()) / w.cols; ++t)
      for (int64_t r = 0; r < w.rows; ++r) {
        const ExactDot dot = exact_dot(w, r, &x[static_cast<size_t>(t * w.cols)]);
        const double b = bias[static_cast<size_t>(r)];
        values.push_back(static_cast<float>(dot.sum + b));
        budget.push_back(static_cast<float>(dot_budget(w, dot, b)));
      }
  }

  Fp4Matrix weight;
  std::vector<float> bias;
};

// One gate/up projection: gate and up [i, h] with biases.
struct GateUpCase {
  GateUpCase(Fp4Format format, int64_t i, int64_t h, const Activation& act, Random& random)
      : gate(format, i, h, random),
        up(format, i, h, random),
        activation(act),
        bias(random.normal(2 * i, 0.3f)) {}

  bool gated() const { return is_gated(activation.kind); }
  // Bias of row r of gate (which = 0) or up (which = 1). If there is a gate, groups of 16 alternate.
  float bias_of(int which, int64_t r) const {
    return bias[static_cast<size_t>(gated() ? r / 16 * 32 + which * 16 + r % 16 : r)];
  }

  std::vector<float> run(const ExpertOps& ops, const ActRows& x, const GemmCall& call = {}) const {
    const Fp4MatrixView first = call.swapped ? up.view() : gate.view(),
                        last = call.swapped ? gate.view() : up.view();
    const Buffer panels = pack_groups(ops, gated() ? &first : nullptr, last);
    ActBuffer out(call.out_dtype, x.rows, last.rows);
    ops.gate_up({.gemm = {last.format, x, panels.data(), bias.data(), last.rows / 16 * (gated() ? 2 : 1),
                          last.rows, call.block_scales, call.block_starts, call.row_scales},
                 .gate_scale = first.tensor_scale * call.tensor_scale,
                 .up_scale = last.tensor_scale * call.tensor_scale,
                 .activation = activation,
                 .out = out.view().data,
                 .out_dtype = call.out_dtype});
    return out.values();
  }

  // Computes the expected values in double and the error bound of an f32 kernel. The bound is the sum of both
  // dot products' bounds times the activation's slopes (the sigmoid forms have |d/dg| <= 1.2 (|u| + 1) for
  // alpha up to 1.702 and |d/du| <= |g|; relu2 has 2 |u|), 16 roundings in the activation, and the rounding
  // of the result.
  void expect(const std::vector<double>& x, DType out_dtype, std::vector<float>& values,
              std::vector<float>& budget) const {
    const int64_t h = up.view().cols, rows = static_cast<int64_t>(x.size()) / h;
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t r = 0; r < up.view().rows; ++r) {
        const ExactDot g_dot = exact_dot(gate.view(), r, &x[static_cast<size_t>(t * h)]);
        const ExactDot u_dot = exact_dot(up.view(), r, &x[static_cast<size_t>(t * h)]);
        const double g = g_dot.sum + bias_of(0, r), u = u_dot.sum + bias_of(1, r);
        const double v = exact_activation(activation, g, u);
        const double slope_g = gated() ? 1.2 * (std::abs(u) + 1) : 0,
                     slope_u = gated() ? std::abs(g) : 2 * std::abs(u);
        const double sums = slope_g * dot_budget(gate.view(), g_dot, bias_of(0, r)) +
                            slope_u * dot_budget(up.view(), u_dot, bias_of(1, r));
        const double result_eps = out_dtype == DType::kBF16 ? kBf16Eps : kF32Eps;
        values.push_back(static_cast<float>(v));
        budget.push_back(static_cast<float>(1.01 * sums + (result_eps + 16 * kF32Eps) * std::abs(v) +
                                            std::numeric_limits<float>::min()));
      }
    }
  }

  Fp4Matrix gate, up;
  Activation activation;
  std::vector<float> bias;
};

}  // namespace fp4moe
