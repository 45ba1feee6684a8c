// Packs a rank's part of a layer's experts into the panels of an ExpertOps table.
#include <string>

#include "base/check.h"
#include "base/weight_store.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "moe/host/panels.h"
#include "moe/local_experts.h"

namespace fp4moe {
namespace {

void copy_bias(const bf16* bias, int64_t stride, int64_t first, float* dst) {
  for (int64_t r = 0; r < kPanelRows; ++r)
    dst[r] = bias == nullptr ? 0.0f : bf16_to_float(bias[(first + r) * stride]);
}

// Packs group `g` of an expert's gate and up panels.
void pack_gate_up_group(const ExpertOps& ops, const PanelGrid& grid, const ExpertWeightsView& w, int64_t g,
                        uint8_t* panels) {
  const bool gated = grid.group_panels == 2;
  if (gated) ops.pack_panel(w.gate, g, panels);
  ops.pack_panel(w.up, g, panels + (gated ? grid.panel_bytes : 0));
}

// Copies the biases of group `g`.
void copy_gate_up_bias(const PanelGrid& grid, const ExpertWeightsView& w, int64_t g, float* bias) {
  const bool gated = grid.group_panels == 2;
  if (gated) copy_bias(w.gate_bias, w.gate_up_bias_stride, g * kPanelRows, bias);
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
  const int64_t gate_up_groups = local.count * gate_up.num_groups,
                down_groups = local.count * down.num_groups;
  packed.gate_up_bias.resize(static_cast<size_t>(gate_up_groups * gate_up.group_panels * kPanelRows));
  packed.down_bias.resize(static_cast<size_t>(down_groups * kPanelRows));

  for (int64_t i = 0; i < gate_up_groups; ++i)
    copy_gate_up_bias(gate_up, experts[static_cast<size_t>(i / gate_up.num_groups)], i % gate_up.num_groups,
                      packed.gate_up_bias.data() + i * gate_up.group_panels * kPanelRows);
  for (int64_t i = 0; i < down_groups; ++i)
    copy_bias(experts[static_cast<size_t>(i / down.num_groups)].down_bias, 1,
              i % down.num_groups * kPanelRows, packed.down_bias.data() + i * kPanelRows);

  const auto pack_gate_up = [&](uint8_t* to) -> Status {
    pool.run(gate_up_groups, [&](int64_t i, int) {
      pack_gate_up_group(ops, gate_up, experts[static_cast<size_t>(i / gate_up.num_groups)],
                         i % gate_up.num_groups, to + i * gate_up.group_bytes());
    });
    return {};
  };
  const auto pack_down = [&](uint8_t* to) -> Status {
    pool.run(down_groups, [&](int64_t i, int) {
      ops.pack_panel(experts[static_cast<size_t>(i / down.num_groups)].down, i % down.num_groups,
                     to + i * down.panel_bytes);
    });
    return {};
  };
  FP4MOE_ASSIGN_OR_RETURN(packed.gate_up, packed_weights(local.count * gate_up.expert_bytes(), pack_gate_up));
  FP4MOE_ASSIGN_OR_RETURN(packed.down, packed_weights(local.count * down.expert_bytes(), pack_down));
  return packed;
}

Result<PackedExperts> fp8_panels_pack(const RunnerRow& row, const MoeProblem& p, const Numerics& numerics,
                                      const MoeWeightsView& weights, ThreadPool& pool) {
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<ExpertWeightsView> experts, local_experts(p, weights));
  for (size_t e = 0; e < experts.size(); ++e)
    for (const Fp4MatrixView* w : {&experts[e].gate, &experts[e].up, &experts[e].down})
      FP4MOE_RETURN_IF_ERROR(check_fp8_scales(*w).with_context("expert " + std::to_string(e)));
  return panels_pack(row, p, numerics, weights, pool);
}

}  // namespace fp4moe
