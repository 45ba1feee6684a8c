// Experts in tiles, on the host and in GPU memory, random inputs for them, and the expected result of their
// layer from double loops over tiled_at().
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "formats/bf16.h"
#include "kernels/cuda/device_array.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/device_moe.h"

namespace fp4moe {

struct ExpertShape {
  std::string name;
  int64_t num_experts = 4, hidden = 64, intermediate = 64;
  ActivationKind kind = ActivationKind::kSwigluOai;
  bool bias = true;
};

// Random codes and scales; after the factors in `scales`, the weights have a magnitude of about 1 / sqrt(K).
class TiledExpertsCase {
 public:
  TiledExpertsCase(Fp4Format format, const ExpertShape& shape, uint32_t seed)
      : shape_(shape), format_(format), rng_(seed), gated_(is_gated(shape.kind)) {
    const int64_t n = shape.num_experts, h = shape.hidden, i = shape.intermediate;
    gate_up_ = random_matrices(gated_ ? 2 * i : i, h);
    down_ = random_matrices(h, i);
    for (int64_t e = 0; e < n; ++e)
      for (const int64_t k : {h, h, i}) scales_.push_back(weight_scale(k) * (0.8f + 0.1f * (e % 5)));
    if (shape.bias) {
      gate_up_bias_ = random_floats((gated_ ? 2 : 1) * n * i);
      down_bias_ = random_floats(n * h);
    }
    device_gate_up_ = std::make_unique<DeviceArray<uint8_t>>(gate_up_.tiles);
    device_down_ = std::make_unique<DeviceArray<uint8_t>>(down_.tiles);
    device_scales_ = std::make_unique<DeviceArray<float>>(scales_);
    device_gate_up_bias_ = std::make_unique<DeviceArray<float>>(gate_up_bias_);
    device_down_bias_ = std::make_unique<DeviceArray<float>>(down_bias_);
  }

  TiledExperts on_device() const {
    TiledExperts experts;
    experts.format = format_;
    experts.num_experts = shape_.num_experts;
    experts.hidden_size = shape_.hidden;
    experts.intermediate_size = shape_.intermediate;
    experts.activation.kind = shape_.kind;
    experts.gate_up = device_gate_up_->data();
    experts.down = device_down_->data();
    experts.scales = device_scales_->data();
    if (shape_.bias) {
      experts.gate_up_bias = device_gate_up_bias_->data();
      experts.down_bias = device_down_bias_->data();
    }
    return experts;
  }

  // A sum over k, and its error bound, which is proportional to the sum of its terms' magnitudes.
  struct Sum {
    double value = 0, magnitude = 0;
  };
  // Appends the activation's outputs for one row with their error bounds.
  void gate_up(int64_t expert, const float* x, float row_scale, std::vector<Sum>* out) const {
    const int64_t i_size = shape_.intermediate;
    for (int64_t i = 0; i < i_size; ++i) {
      const int64_t row = gated_ ? i / 32 * 64 + i % 32 / 8 * 16 + i % 8 : i;
      const float* scales = scales_.data() + 3 * expert;
      Sum gate, up;
      if (gated_) gate = sum(gate_up_, expert, row, x, scales[0] * row_scale);
      up = sum(gate_up_, expert, row + (gated_ ? 8 : 0), x, scales[1] * row_scale);
      if (shape_.bias) {
        const float* bias = gate_up_bias_.data() + expert * (gated_ ? 2 : 1) * i_size;
        if (gated_) gate.value += bias[i];
        up.value += bias[(gated_ ? i_size : 0) + i];
      }
      out->push_back(activate(gate, up));
    }
  }
  void down(int64_t expert, const float* h, std::vector<Sum>* out) const {
    for (int64_t r = 0; r < shape_.hidden; ++r) {
      Sum s = sum(down_, expert, r, h, scales_[size_t(3 * expert + 2)]);
      if (shape_.bias) s.value += down_bias_[size_t(expert * shape_.hidden + r)];
      s.magnitude += std::abs(s.value) * 1e-6;
      out->push_back(s);
    }
  }

  std::vector<float> random_floats(int64_t size) {
    std::normal_distribution<float> normal(0, 0.5f);
    std::vector<float> v(static_cast<size_t>(size));
    for (float& f : v) f = normal(rng_);
    return v;
  }
  std::vector<float> random_bf16_values(int64_t size) {
    std::vector<float> v = random_floats(size);
    for (float& f : v) f = round_to_bf16(2 * f);
    return v;
  }
  std::mt19937& rng() { return rng_; }

 private:
  // One [n, k] matrix per expert.
  struct Matrices {
    int64_t n = 0, k = 0;
    std::vector<uint8_t> tiles;
  };
  Matrices random_matrices(int64_t n, int64_t k) {
    const bool mx = format_ == Fp4Format::kMxfp4;
    std::vector<uint8_t> tiles(static_cast<size_t>(shape_.num_experts * tiled_bytes(format_, n, k)));
    const auto bytes = static_cast<size_t>(tile_bytes(format_));
    for (size_t b = 0; b < tiles.size(); ++b) {
      const auto r = static_cast<uint8_t>(rng_());
      if (b % bytes < kTileCodeBytes)
        tiles[b] = r;
      else
        tiles[b] = static_cast<uint8_t>(mx ? 250 + r % 4 : 0x78 + r % 16);
    }
    return {n, k, std::move(tiles)};
  }
  float weight_scale(int64_t k) const {
    const int exponent = format_ == Fp4Format::kMxfp4 ? -126 + 251 - 127 : -126 + (0x7a80 >> 7) - 127;
    return std::ldexp(0.4f / std::sqrt(static_cast<float>(k)), -exponent);
  }
  Sum sum(const Matrices& m, int64_t expert, int64_t row, const float* x, float scale) const {
    const uint8_t* matrix = m.tiles.data() + expert * tiled_bytes(format_, m.n, m.k);
    Sum s;
    for (int64_t c = 0; c < m.k; ++c) {
      const double term = static_cast<double>(tiled_at(format_, matrix, m.n, m.k, row, c)) * x[c];
      s.value += term;
      s.magnitude += std::abs(term);
    }
    // The kernels add 16 terms at a time in f32 and do not round to nearest.
    const double epsilon = (static_cast<double>(m.k) / 16 + 8) * 0x1p-23;
    return {s.value * scale, s.magnitude * std::abs(scale) * epsilon};
  }
  Sum activate(const Sum& gate, const Sum& up) const {
    if (!gated_) {
      const double u = up.value < 0 ? 0 : up.value;
      return {u * u, (2 * std::abs(up.value) + up.magnitude) * up.magnitude};
    }
    const bool silu = shape_.kind == ActivationKind::kSilu;
    const Activation a;
    const double alpha = silu ? 1 : a.alpha, beta = silu ? 0 : a.beta, limit = silu ? INFINITY : a.limit;
    const double g = gate.value > limit ? limit : gate.value;
    const double u = up.value > limit ? limit : up.value < -limit ? -limit : up.value;
    const double act = g / (1 + std::exp(-alpha * g));
    const double value = act * (u + beta);
    return {value, 1.2 * gate.magnitude * (std::abs(u + beta) + up.magnitude) + std::abs(act) * up.magnitude +
                       2e-6 * std::abs(value)};
  }

  ExpertShape shape_;
  Fp4Format format_;
  std::mt19937 rng_;
  bool gated_;
  Matrices gate_up_, down_;
  std::vector<float> scales_, gate_up_bias_, down_bias_;
  std::unique_ptr<DeviceArray<uint8_t>> device_gate_up_, device_down_;
  std::unique_ptr<DeviceArray<float>> device_scales_, device_gate_up_bias_, device_down_bias_;
};

}  // namespace fp4moe
