#include "moe/local_experts.h"

#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

Status check_matrix(const Fp4MatrixView& m, Fp4Format format, int64_t rows, int64_t cols, const char* name) {
  if (m.format == format && m.rows == rows && m.cols == cols) return {};
  const auto text = [](Fp4Format f, int64_t r, int64_t c) {
    return std::string(fp4_format_name(f)) + " [" + std::to_string(r) + ", " + std::to_string(c) + "]";
  };
  return invalid_argument(std::string(name) + " is " + text(m.format, m.rows, m.cols) +
                          ", but the plan has " + text(format, rows, cols));
}

Bf16MatrixView row_slice(Bf16MatrixView m, int64_t first, int64_t count) {
  m.data += first * m.row_stride;
  m.rows = count;
  return m;
}
Bf16MatrixView column_slice(Bf16MatrixView m, int64_t first, int64_t count) {
  m.data += first * m.col_stride;
  m.cols = count;
  return m;
}

// This rank's part of an expert. Only the first shard has the down bias, so that it is added once.
template <class Expert>
Expert local_part(Expert w, const MoeProblem& p) {
  const Shard part = p.local_intermediate();
  if (is_gated(p.activation.kind)) w.gate = row_slice(w.gate, part.first, part.count);
  w.up = row_slice(w.up, part.first, part.count);
  w.down = column_slice(w.down, part.first, part.count);
  if (w.gate_bias != nullptr) w.gate_bias += part.first * w.gate_up_bias_stride;
  if (w.up_bias != nullptr) w.up_bias += part.first * w.gate_up_bias_stride;
  if (p.layout.moe_tp_rank() != 0) w.down_bias = nullptr;
  return w;
}

Status check_weights(const MoeProblem& p, const MoeWeightsView& weights) {
  if (static_cast<int64_t>(weights.experts.size()) != p.num_physical())
    return invalid_argument("the weights have " + std::to_string(weights.experts.size()) +
                            " experts, but the plan has " + std::to_string(p.num_physical()));
  for (size_t e = 0; e < weights.experts.size(); ++e) {
    const ExpertWeightsView& w = weights.experts[e];
    const auto check = [&](const Fp4MatrixView& m, int64_t rows, int64_t cols, const char* name) {
      return check_matrix(m, p.format, rows, cols, name).with_context("expert " + std::to_string(e));
    };
    if (is_gated(p.activation.kind))
      FP4MOE_RETURN_IF_ERROR(check(w.gate, p.intermediate_size, p.hidden_size, "gate"));
    FP4MOE_RETURN_IF_ERROR(check(w.up, p.intermediate_size, p.hidden_size, "up"));
    FP4MOE_RETURN_IF_ERROR(check(w.down, p.hidden_size, p.intermediate_size, "down"));
  }
  return {};
}

Status check_bf16_matrix(const Bf16MatrixView& m, int64_t rows, int64_t cols, size_t expert,
                         const char* name) {
  if (m.rows == rows && m.cols == cols) return {};
  return invalid_argument("expert " + std::to_string(expert) + ": " + name + " is bf16 [" +
                          std::to_string(m.rows) + ", " + std::to_string(m.cols) + "], but the plan has [" +
                          std::to_string(rows) + ", " + std::to_string(cols) + "]");
}

Status check_bf16_weights(const MoeProblem& p, const MoeWeightsView& weights) {
  const std::vector<Bf16ExpertView>& experts = weights.bf16_experts;
  if (weights.format != Fp4Format::kNone || static_cast<int64_t>(experts.size()) != p.num_physical())
    return invalid_argument("the weights have " + std::to_string(experts.size()) +
                            " bf16 experts, but the plan has " + std::to_string(p.num_physical()));
  for (size_t e = 0; e < experts.size(); ++e) {
    if (is_gated(p.activation.kind))
      FP4MOE_RETURN_IF_ERROR(
          check_bf16_matrix(experts[e].gate, p.intermediate_size, p.hidden_size, e, "gate"));
    FP4MOE_RETURN_IF_ERROR(check_bf16_matrix(experts[e].up, p.intermediate_size, p.hidden_size, e, "up"));
    FP4MOE_RETURN_IF_ERROR(check_bf16_matrix(experts[e].down, p.hidden_size, p.intermediate_size, e, "down"));
  }
  return {};
}

// Returns this rank's part of each of its experts.
template <class View>
std::vector<View> local_parts(const MoeProblem& p, const std::vector<View>& experts) {
  const Shard local = p.local_experts();
  std::vector<View> parts;
  for (int64_t e = local.first; e < local.first + local.count; ++e)
    parts.push_back(local_part(experts[static_cast<size_t>(e)], p));
  return parts;
}

}  // namespace

MoeWeightsView physical_experts(const MoeWeightsView& logical, const ExpertPlacement& placement) {
  MoeWeightsView physical = logical;
  physical.experts.clear();
  physical.bf16_experts.clear();
  for (const int32_t e : placement.logical_of()) {
    const auto at = static_cast<size_t>(e);
    if (at < logical.experts.size()) physical.experts.push_back(logical.experts[at]);
    if (at < logical.bf16_experts.size()) physical.bf16_experts.push_back(logical.bf16_experts[at]);
  }
  return physical;
}

Result<std::vector<ExpertWeightsView>> local_experts(const MoeProblem& p, const MoeWeightsView& weights) {
  FP4MOE_RETURN_IF_ERROR(check_weights(p, weights));
  return local_parts(p, weights.experts);
}

Result<std::vector<Bf16ExpertView>> local_bf16_experts(const MoeProblem& p, const MoeWeightsView& weights) {
  FP4MOE_RETURN_IF_ERROR(check_bf16_weights(p, weights));
  return local_parts(p, weights.bf16_experts);
}

}  // namespace fp4moe
