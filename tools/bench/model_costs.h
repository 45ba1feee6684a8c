// Lower bounds on the cost of a model's tokens: weights read and multiplies done.
#pragma once

#include <cstdint>

#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"
#include "kernels/ops.h"

namespace fp4moe {

// Excludes the KV cache, activations and attention's own products.
struct ModelCosts {
  // dense: all weights except experts and embedding, used by every token. experts: all of them; a token uses
  // top_k per layer.
  double dense_bytes = 0, expert_bytes = 0;
  double dense_flops = 0, head_flops = 0;  // per token; per token with logits
  double expert_flops = 0;                 // per token: top_k experts in each layer
  double num_experts = 1, top_k = 1;

  // Expected weight bytes that one step of num_tokens reads, each once; experts are chosen uniformly.
  double step_bytes(double num_tokens) const;
};
ModelCosts model_costs(const Checkpoint& checkpoint, const ModelConfig& config, DenseQuant quant);

}  // namespace fp4moe
