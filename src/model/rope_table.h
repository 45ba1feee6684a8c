// Rotary frequencies: plain, or YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension").
#pragma once

#include <cstdint>
#include <vector>

#include "io/config/model_config.h"

namespace fp4moe {

struct RopeTable {
  std::vector<float> inv_freq;  // [rotary_dim / 2], radians per position
  float attention_factor = 1;   // multiplies cos and sin
};

RopeTable make_rope_table(const RopeConfig& config, int64_t rotary_dim);

}  // namespace fp4moe
