// Lower bounds on the cost of a model's tokens: bytes of weights and flops.
#pragma once

#include <cstdint>

#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"
#include "kernels/ops.h"

namespace fp4moe {

// Excludes the KV cache, activations and attention's own products.
struct ModelCosts {
  // dense: all weights except experts and embedding; every token uses them. expert: all experts; a token uses
  // top_k of them per layer.
  double dense_bytes = 0, expert_bytes = 0;
  double dense_flops = 0, head_flops = 0;  // per token, and per token with logits
  double expert_flops = 0;                 // per token: top_k experts in each layer
  double num_experts = 1, top_k = 1;

  // Returns the expected weight bytes for a step of num_tokens that reads each weight once; assumes that
  // experts are chosen uniformly.
  double step_bytes(double num_tokens) const;
};
ModelCosts model_costs(const Checkpoint& checkpoint, const ModelConfig& config, DenseQuant quant);

}  // namespace fp4moe
