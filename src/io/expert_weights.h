// The experts of one MoE layer as the checkpoint holds them: typed views, no data moved. Every dialect ends
// here, so that what runs them knows formats and not dialects.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/fp4_matrix.h"
#include "io/checkpoint.h"
#include "io/model_config.h"

namespace fp4moe {

// gate and up [I, H], down [H, I]. Biases are null where the model has none. A bias element i lies at
// bias[i * stride] (gpt-oss interleaves gate and up: stride 2).
struct ExpertWeightsView {
  Fp4MatrixView gate, up, down;
  const bf16* gate_bias = nullptr;
  const bf16* up_bias = nullptr;
  const bf16* down_bias = nullptr;
  int64_t gate_up_bias_stride = 1;
  // Calibrated activation scales, decode direction (amax / 2688); 1.0 where the checkpoint has none.
  float gate_input_scale = 1, up_input_scale = 1, down_input_scale = 1;
};

struct MoeWeightsView {
  Fp4Format format = Fp4Format::kMxfp4;
  int64_t hidden_size = 0, intermediate_size = 0;
  std::vector<ExpertWeightsView> experts;  // [E]
};

// Finds, checks (names, dtypes, shapes, finite positive scales, no 0xFF e8m0 byte) and types the experts
// of layer `layer`. Errors name the tensor, both values, and for scales the expert and position.
Result<MoeWeightsView> load_expert_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                           int64_t layer);

}  // namespace fp4moe
