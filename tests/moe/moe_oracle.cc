#include "moe/moe_oracle.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "formats/nearest_value.h"

namespace fp4moe {
namespace {

constexpr double kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

double e2m1_value(int code) { return (code & 8) != 0 ? -kE2m1[code & 7] : kE2m1[code & 7]; }

double e4m3_value(int byte) {
  static const std::vector<double> kMagnitudes = oracle::e4m3_magnitudes();
  const double magnitude = kMagnitudes[static_cast<size_t>(byte & 0x7f)];
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

double block_scale(const Fp4MatrixView& m, int64_t row, int64_t block) {
  const int byte = m.scales[row * m.scale_stride_bytes + block];
  return m.format == Fp4Format::kMxfp4 ? std::ldexp(1.0, byte - 127) : e4m3_value(byte);
}

double dot(const Fp4MatrixView& m, int64_t row, const std::vector<double>& x) {
  const int64_t size = m.format == Fp4Format::kMxfp4 ? 32 : 16;
  double sum = 0;
  for (int64_t block = 0; block < m.cols / size; ++block) {
    double part = 0;
    for (int64_t c = block * size; c < (block + 1) * size; ++c) {
      const int byte = m.codes[row * m.code_stride_bytes + c / 2];
      part += e2m1_value(c % 2 == 0 ? byte & 15 : byte >> 4) * x[static_cast<size_t>(c)];
    }
    sum += part * block_scale(m, row, block);
  }
  return sum * m.tensor_scale;
}

// dot() with FP8 operands. MXFP4 gives the same result as dot(). For NVFP4, the power of two p moves the
// largest scale of the row's nonzero blocks to 224 ... 448, and each code times its scale becomes e4m3(code *
// scale * p / 8) * 8 / p.
double fp8_dot(const Fp4MatrixView& m, int64_t row, const std::vector<double>& x) {
  if (m.format == Fp4Format::kMxfp4) return dot(m, row, x);
  const auto code_at = [&](int64_t c) {
    const int byte = m.codes[row * m.code_stride_bytes + c / 2];
    return e2m1_value(c % 2 == 0 ? byte & 15 : byte >> 4);
  };
  double most = 0;
  for (int64_t c = 0; c < m.cols; ++c)
    if (code_at(c) != 0) most = std::max(most, block_scale(m, row, c / 16));
  double p = 1;
  while (most > 0 && most * p * 2 <= 448) p *= 2;
  double sum = 0;
  for (int64_t c = 0; c < m.cols; ++c) {
    const double value = code_at(c) * block_scale(m, row, c / 16) * p / 8;
    sum += e4m3_value(oracle::e4m3(value)) * x[static_cast<size_t>(c)];
  }
  return sum * 8 / p * m.tensor_scale;
}

double bias_at(const bf16* bias, int64_t i) {
  return bias == nullptr ? 0 : std::bit_cast<float>(static_cast<uint32_t>(bias[i].bits) << 16);
}

double activate(const Activation& a, double g, double u) {
  if (a.kind == ActivationKind::kRelu2) return u > 0 ? u * u : 0;
  if (a.kind == ActivationKind::kSilu) return g / (1 + std::exp(-g)) * u;
  g = std::min<double>(g, a.limit);
  u = std::clamp<double>(u, -a.limit, a.limit);
  return g / (1 + std::exp(-a.alpha * g)) * (u + a.beta);
}

float to_bf16_value(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// Quantises sixteen values. Uses floats because the exact mode's arithmetic is single precision.
void nvfp4_block(const float* x, float encode, double decode, double* out) {
  float amax = 0;
  for (int i = 0; i < 16; ++i) amax = std::max(amax, std::abs(x[i]));
  const float scale = amax * (encode * (1.0f / 6.0f));
  const auto sf = static_cast<float>(e4m3_value(oracle::e4m3(scale)));
  const float factor = std::min(1.0f / (sf * (1.0f / encode)), std::numeric_limits<float>::max());
  for (int i = 0; i < 16; ++i) {
    const float scaled = x[i] * factor;
    out[i] = e2m1_value(oracle::e2m1(scaled)) * sf * decode;
  }
}

void int8_block(const float* x, int size, double* out) {
  float amax = 0;
  for (int i = 0; i < size; ++i) amax = std::max(amax, std::abs(x[i]));
  const float scale = amax / 127;
  for (int i = 0; i < size; ++i)
    out[i] = scale == 0 ? 0 : static_cast<double>(std::nearbyint(x[i] / scale)) * scale;
}

// Quantises a row with one scale.
void fp8_row(const std::vector<float>& x, std::vector<double>& out) {
  float amax = 0;
  for (const float v : x) amax = std::max(amax, std::abs(v));
  const float scale = amax / 448;
  for (size_t i = 0; i < x.size(); ++i) {
    const float scaled = scale == 0 ? 0 : x[i] * (1 / scale);
    out[i] = e4m3_value(oracle::e4m3(scaled)) * scale;
  }
}

// Returns the decode-direction activation scale of the first or second GEMM.
float static_scale(const OracleLayer& layer, int64_t expert, ActScaleChoice choice, bool second) {
  const auto own = [&](const ExpertWeightsView& w) {
    if (second) return w.down_input_scale;
    return layer.activation.kind == ActivationKind::kRelu2 ? w.up_input_scale
                                                           : std::max(w.gate_input_scale, w.up_input_scale);
  };
  if (choice == ActScaleChoice::kPerExpert) return own(layer.weights->experts[static_cast<size_t>(expert)]);
  float largest = 0;
  for (const ExpertWeightsView& w : layer.weights->experts) largest = std::max(largest, own(w));
  return largest;
}

}  // namespace

std::vector<double> oracle_quantised(const OracleLayer& layer, const std::vector<float>& x, float scale,
                                     ActScaleChoice choice) {
  std::vector<double> out(x.begin(), x.end());
  if (layer.numerics.is_fp8()) {
    fp8_row(x, out);
  } else if (layer.numerics.scheme == Scheme::kW4A8) {
    const int size = layer.weights->format == Fp4Format::kMxfp4 ? 32 : 16;
    for (size_t i = 0; i < x.size(); i += static_cast<size_t>(size)) int8_block(&x[i], size, &out[i]);
  } else if (layer.numerics.scheme == Scheme::kW4A4) {
    float encode = 1.0f / scale;
    double decode = scale;
    if (choice == ActScaleChoice::kPerToken) {
      float amax = 0;
      for (float v : x) amax = std::max(amax, std::abs(v));
      encode = amax == 0 ? std::numeric_limits<float>::max() : 2688 / amax;
      decode = amax == 0 ? 0 : 1.0f / encode;
    }
    for (size_t i = 0; i < x.size(); i += 16) nvfp4_block(&x[i], encode, decode, &out[i]);
  }
  return out;
}

std::vector<double> oracle_expert(const OracleLayer& layer, int64_t expert, const std::vector<float>& x) {
  const ExpertWeightsView& w = layer.weights->experts[static_cast<size_t>(expert)];
  const Numerics& n = layer.numerics;
  std::vector<double> in(x.begin(), x.end());
  if (!layer.skip_input_quantisation)
    in = oracle_quantised(layer, x, static_scale(layer, expert, n.a1, false), n.a1);
  const bool gated = layer.activation.kind != ActivationKind::kRelu2;
  const auto dot_of = n.is_fp8() ? fp8_dot : dot;
  const bool rounds = n.scheme == Scheme::kW4A16 || n.is_fp8()
                          ? layer.act_dtype == DType::kBF16
                          : n.scheme == Scheme::kW4A4 && n.intermediate == IntermediateRounding::kBf16First;
  std::vector<float> h;
  for (int64_t i = 0; i < w.up.rows; ++i) {
    const int64_t b = i * w.gate_up_bias_stride;
    const double g = gated ? dot_of(w.gate, i, in) + bias_at(w.gate_bias, b) : 0;
    const auto v =
        static_cast<float>(activate(layer.activation, g, dot_of(w.up, i, in) + bias_at(w.up_bias, b)));
    h.push_back(rounds ? to_bf16_value(v) : v);
  }
  std::vector<double> middle(h.begin(), h.end());
  if (!layer.skip_intermediate_quantisation)
    middle = oracle_quantised(layer, h, static_scale(layer, expert, n.a2, true), n.a2);
  std::vector<double> out;
  for (int64_t i = 0; i < w.down.rows; ++i)
    out.push_back(dot_of(w.down, i, middle) + bias_at(w.down_bias, i));
  return out;
}

std::vector<double> oracle_moe(const OracleLayer& layer, const std::vector<float>& x,
                               const std::vector<int32_t>& ids, const std::vector<float>& weights) {
  const auto hidden = static_cast<size_t>(layer.weights->hidden_size);
  const size_t tokens = x.size() / hidden, top_k = tokens == 0 ? 0 : ids.size() / tokens;
  std::vector<double> out(x.size());
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    const int32_t e = ids[slot];
    if (e < 0 || e >= static_cast<int64_t>(layer.weights->experts.size())) continue;
    const float* row = &x[slot / top_k * hidden];
    const std::vector<double> y = oracle_expert(layer, e, {row, row + hidden});
    for (size_t i = 0; i < hidden; ++i) out[slot / top_k * hidden + i] += weights[slot] * y[i];
  }
  return out;
}

}  // namespace fp4moe
