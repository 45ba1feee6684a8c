// Shared by the expert op and MoE layer tests: random FP4 experts in a checkpoint's layout, and an oracle
// that sums in double directly from fp4_at(). The tests check ref_expert_ops() against it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "kernels/dense_case.h"
#include "kernels/expert_ops.h"

namespace fp4moe {

// Returns the expert tables that this machine supports; ref_expert_ops() is first.
inline std::vector<const ExpertOps*> expert_tables() {
  std::vector<const ExpertOps*> tables = {&ref_expert_ops()};
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
    if (isa_available(isa)) tables.push_back(&cpu_expert_ops(isa));
  return tables;
}

// Owns a random [rows, cols] FP4 matrix: uniform codes, and block scales that give the values a magnitude of
// about 1 / sqrt(cols).
class Fp4Matrix {
 public:
  Fp4Matrix(Fp4Format format, int64_t rows, int64_t cols, Random& random)
      : format_(format), rows_(rows), cols_(cols) {
    const auto byte = [&](int64_t low, int64_t high) {
      return static_cast<uint8_t>(random.integer(low, high));
    };
    for (int64_t i = 0; i < rows * cols / 2; ++i) codes_.push_back(byte(0, 255));
    const int exponent = static_cast<int>(std::lround(-0.5 * std::log2(static_cast<double>(cols)))) - 1;
    for (int64_t i = 0; i < rows * cols / fp4_block(format); ++i)
      scales_.push_back(format == Fp4Format::kMxfp4 ? byte(126 + exponent, 128 + exponent)
                                                    : byte(0x28, 0x40));
    if (format == Fp4Format::kNvfp4) tensor_scale_ = 1.17f * std::ldexp(1.0f, exponent);
  }

  Fp4MatrixView view() const {
    return {format_,      rows_, cols_, codes_.data(), scales_.data(), cols_ / 2, cols_ / fp4_block(format_),
            tensor_scale_};
  }
  uint8_t& code_byte(int64_t row, int64_t col) {
    return codes_[static_cast<size_t>((row * cols_ + col) / 2)];
  }
  uint8_t& scale_byte(int64_t row, int64_t block) {
    return scales_[static_cast<size_t>(row * (cols_ / fp4_block(format_)) + block)];
  }

 private:
  Fp4Format format_;
  int64_t rows_, cols_;
  float tensor_scale_ = 1;
  std::vector<uint8_t> codes_, scales_;
};

// sum = x . w[row] and magnitude = sum of the terms' absolute values, in double.
struct ExactDot {
  double sum = 0, magnitude = 0;
};
template <class X>
ExactDot exact_dot(const Fp4MatrixView& w, int64_t row, const X* x) {
  ExactDot dot;
  for (int64_t c = 0; c < w.cols; ++c) {
    const double term = static_cast<double>(fp4_at(w, row, c)) * x[c];
    dot.sum += term;
    dot.magnitude += std::abs(term);
  }
  return dot;
}

// Error bound of an f32 kernel. Products are exact. Each term is rounded at most once per column of its
// block, once per block, once in each product with a scale (block, tensor and the activation's three), and
// once when the bias is added.
inline double dot_budget(const Fp4MatrixView& w, const ExactDot& dot, double bias) {
  const double roundings = fp4_block(w.format) + static_cast<double>(w.cols / fp4_block(w.format)) + 7;
  return roundings * kF32Eps * dot.magnitude + kF32Eps * (std::abs(dot.sum + bias) + std::abs(bias)) +
         std::numeric_limits<float>::min();
}

inline double exact_activation(const Activation& act, double g, double u) {
  switch (act.kind) {
    case ActivationKind::kSwigluOai:
      g = std::min<double>(g, act.limit);
      u = std::clamp<double>(u, -act.limit, act.limit);
      return g / (1 + std::exp(-act.alpha * g)) * (u + act.beta);
    case ActivationKind::kSilu:
      return g / (1 + std::exp(-g)) * u;
    case ActivationKind::kRelu2:
      return u > 0 ? u * u : 0;
  }
  return NAN;
}

// Packs one or two matrices (gate can be null) into panels in a table's layout, row group by row group.
inline Buffer pack_groups(const ExpertOps& ops, const Fp4MatrixView* gate, const Fp4MatrixView& last) {
  const int64_t bytes = ops.panel_bytes(last.format, last.cols), groups = last.rows / kPanelRows;
  Buffer buffer = std::move(*Buffer::make(groups * bytes * (gate == nullptr ? 1 : 2)));
  uint8_t* dst = buffer.data();
  for (int64_t g = 0; g < groups; ++g) {
    if (gate != nullptr) ops.pack_panel(*gate, g, std::exchange(dst, dst + bytes));
    ops.pack_panel(last, g, std::exchange(dst, dst + bytes));
  }
  return buffer;
}

}  // namespace fp4moe
