// Packs a rank's part of a layer's experts into the panels of an ExpertOps table.
#include <string>

#include "base/check.h"
#include "moe/local_experts.h"
#include "moe/panels.h"

namespace fp4moe {
namespace {

void copy_bias(const bf16* bias, int64_t stride, int64_t first, float* dst) {
  for (int64_t r = 0; r < kPanelRows; ++r)
    dst[r] = bias == nullptr ? 0.0f : bf16_to_float(bias[(first + r) * stride]);
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
  const ExpertOps& ops = row.ops();
  const PanelGrid gate_up = gate_up_grid(ops, p), down = down_grid(ops, p);
  const Shard local = p.local_experts();
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<ExpertWeightsView> experts, local_experts(p, weights));

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
