#include "bench/model_costs.h"

#include <cmath>
#include <string>

#include "engine/startup/memory_plan.h"
#include "io/checkpoint/mtp_layers.h"

namespace fp4moe {
namespace {

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Returns two flops (a multiply and an add) per weight. A byte of codes holds two weights; scales are not
// weights.
double flops_of(const TensorEntry& tensor) {
  if (has(tensor.name, "scale")) return 0;
  const bool is_codes = tensor.view.dtype == DType::kU8 || tensor.view.dtype == DType::kI8;
  return (is_codes ? 4.0 : 2.0) * static_cast<double>(tensor.view.num_elems());
}

}  // namespace

double ModelCosts::step_bytes(double num_tokens) const {
  return dense_bytes + expert_bytes * (1 - std::pow(1 - top_k / num_experts, num_tokens));
}

ModelCosts model_costs(const Checkpoint& checkpoint, const ModelConfig& config, DenseQuant quant) {
  ModelCosts costs;
  costs.num_experts = static_cast<double>(config.num_experts);
  costs.top_k = static_cast<double>(config.top_k);
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    if (is_mtp_tensor(config, checkpoint, tensor.name)) continue;
    const bool is_embedding = has(tensor.name, "embed_tokens");
    const auto num_bytes =
        static_cast<double>(is_embedding ? head_bytes(tensor, quant) : held_bytes(tensor, quant));
    if (has(tensor.name, ".experts.")) {
      costs.expert_bytes += num_bytes;
      costs.expert_flops += flops_of(tensor) * costs.top_k / costs.num_experts;
    } else if (!is_embedding || config.tie_word_embeddings) {
      costs.dense_bytes += num_bytes;
      (is_embedding || has(tensor.name, "lm_head") ? costs.head_flops : costs.dense_flops) +=
          flops_of(tensor);
    }
  }
  return costs;
}

}  // namespace fp4moe
