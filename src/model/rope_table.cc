#include "model/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fp4moe {
namespace {

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_attention_factor(const RopeConfig& config) {
  if (config.attention_factor) return *config.attention_factor;
  if (config.mscale && config.mscale_all_dim)
    return yarn_mscale(config.factor, *config.mscale) / yarn_mscale(config.factor, *config.mscale_all_dim);
  return yarn_mscale(config.factor, 1.0);
}

// The (fractional) index of the pair that makes `num_rotations` turns over the original context.
double pair_of_rotations(const RopeConfig& config, double rotary_dim, double num_rotations) {
  const double wavelengths = config.original_max_position_embeddings / (num_rotations * 2 * std::numbers::pi);
  return rotary_dim * std::log(wavelengths) / (2 * std::log(config.theta));
}

}  // namespace

RopeTable make_rope_table(const RopeConfig& config, int64_t rotary_dim) {
  const double dim = static_cast<double>(rotary_dim);
  RopeTable table;
  table.inv_freq.resize(static_cast<size_t>(rotary_dim / 2));
  const bool yarn = config.type == RopeConfig::Type::kYarn;
  double low = 0, high = 0;  // pairs below low keep their frequency, pairs above high are fully interpolated
  if (yarn) {
    low = pair_of_rotations(config, dim, config.beta_fast);
    high = pair_of_rotations(config, dim, config.beta_slow);
    if (config.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0);
    high = std::min(high, dim - 1);
    if (low == high) high += 0.001;
    table.attention_factor = static_cast<float>(yarn_attention_factor(config));
  }
  for (size_t i = 0; i < table.inv_freq.size(); ++i) {
    const double frequency = std::pow(config.theta, -2.0 * static_cast<double>(i) / dim);
    const double interpolated =
        yarn ? std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0) : 0.0;
    table.inv_freq[i] =
        static_cast<float>(frequency * (1 - interpolated) + frequency / config.factor * interpolated);
  }
  return table;
}

}  // namespace fp4moe
