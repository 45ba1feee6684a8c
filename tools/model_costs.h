// What tokens of a model cost at least: weights that are read, multiplies that are done.
#pragma once

#include <cstdint>

#include "io/checkpoint.h"
#include "io/model_config.h"
#include "kernels/ops.h"

namespace fp4moe {

// Without KV cache, activations and attention's own products.
struct ModelCosts {
  // Every token visits the dense weights: all but experts and embedding. Of the experts it visits top_k.
  double dense_bytes = 0, expert_bytes = 0;
  double dense_flops = 0, head_flops = 0;  // of a token; of one for which there are logits
  double expert_flops = 0;                 // of a token: top_k experts in each layer
  double num_experts = 1, top_k = 1;

  // Weights that one step of so many tokens reads, each once; experts are chosen uniformly.
  double step_bytes(double num_tokens) const;
};
ModelCosts model_costs(const Checkpoint& checkpoint, const ModelConfig& config, DenseQuant quant);

}  // namespace fp4moe
