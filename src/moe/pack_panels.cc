// Packs a rank's part of a layer's experts into the panels of an ExpertOps table.
#include <string>

#include "base/check.h"
#include "moe/panels.h"

namespace fp4moe {
namespace {

void copy_bias(const bf16* bias, int64_t stride, int64_t first, float* dst) {
  for (int64_t r = 0; r < kPanelRows; ++r)
    dst[r] = bias == nullptr ? 0.0f : bf16_to_float(bias[(first + r) * stride]);
}

Status check_matrix(const Fp4MatrixView& m, Fp4Format format, int64_t rows, int64_t cols, const char* name) {
  if (m.format == format && m.rows == rows && m.cols == cols) return {};
  const auto text = [](Fp4Format f, int64_t r, int64_t c) {
    return std::string(fp4_format_name(f)) + " [" + std::to_string(r) + ", " + std::to_string(c) + "]";
  };
  return invalid_argument(std::string(name) + " is " + text(m.format, m.rows, m.cols) + ", the plan has " +
                          text(format, rows, cols));
}

// The part of an expert that this rank has: rows of gate and up, columns of down. The down bias is added
// once, by the first shard.
ExpertWeightsView local_part(ExpertWeightsView w, const MoeProblem& p) {
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
  if (static_cast<int64_t>(weights.experts.size()) != p.num_experts)
    return invalid_argument("weights of " + std::to_string(weights.experts.size()) +
                            " experts, the plan has " + std::to_string(p.num_experts));
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

// Packs group `g` of an expert's gate and up, and their biases.
void pack_gate_up(const ExpertOps& ops, const PanelGrid& grid, const ExpertWeightsView& w, int64_t g,
                  uint8_t* panels, float* bias) {
  const bool gated = grid.group_panels == 2;
  if (gated) {
    ops.pack_panel(w.gate, g, panels);
    copy_bias(w.gate_bias, w.gate_up_bias_stride, g * kPanelRows, bias);
  }
  ops.pack_panel(w.up, g, panels + (gated ? grid.panel_bytes : 0));
  copy_bias(w.up_bias, w.gate_up_bias_stride, g * kPanelRows, bias + (gated ? kPanelRows : 0));
}

}  // namespace

Result<PackedExperts> panels_pack(const RunnerRow& row, const MoeProblem& p, const Numerics& numerics,
                                  const MoeWeightsView& weights, ThreadPool& pool) {
  FP4MOE_RETURN_IF_ERROR(check_weights(p, weights));
  const ExpertOps& ops = row.ops();
  const PanelGrid gate_up = gate_up_grid(ops, p), down = down_grid(ops, p);
  const Shard local = p.local_experts();
  std::vector<ExpertWeightsView> experts;
  for (int64_t e = local.first; e < local.first + local.count; ++e)
    experts.push_back(local_part(weights.experts[static_cast<size_t>(e)], p));

  PackedExperts packed;
  packed.numerics = numerics;
  packed.scales = resolve_scales(weights.experts, numerics, local);
  FP4MOE_ASSIGN_OR_RETURN(packed.gate_up, Buffer::make(local.count * gate_up.expert_bytes()));
  FP4MOE_ASSIGN_OR_RETURN(packed.down, Buffer::make(local.count * down.expert_bytes()));
  packed.gate_up_bias.resize(
      static_cast<size_t>(local.count * gate_up.num_groups * gate_up.group_panels * kPanelRows));
  packed.down_bias.resize(static_cast<size_t>(local.count * p.hidden_size));

  pool.run(local.count * gate_up.num_groups, [&](int64_t i, int) {
    pack_gate_up(ops, gate_up, experts[static_cast<size_t>(i / gate_up.num_groups)], i % gate_up.num_groups,
                 packed.gate_up.data() + i * gate_up.group_bytes(),
                 packed.gate_up_bias.data() + i * gate_up.group_panels * kPanelRows);
  });
  pool.run(local.count * down.num_groups, [&](int64_t i, int) {
    const ExpertWeightsView& w = experts[static_cast<size_t>(i / down.num_groups)];
    ops.pack_panel(w.down, i % down.num_groups, packed.down.data() + i * down.panel_bytes);
    copy_bias(w.down_bias, 1, i % down.num_groups * kPanelRows, packed.down_bias.data() + i * kPanelRows);
  });
  return packed;
}

}  // namespace fp4moe
