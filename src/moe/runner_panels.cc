// The runner of every CPU row: packs weights into the panels of an ExpertOps table and runs them in two
// parallel phases, gate/up with the activation, then down. Chunks of both phases are handed out over all
// active experts.
#include <algorithm>
#include <span>
#include <string>

#include "base/check.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

// Weights of one chunk: large beside what handing a chunk out costs, small enough to stay in the L2 cache
// while an expert's rows pass over them.
constexpr int64_t kChunkBytes = 96 << 10;

// How one of the two weights of every expert is cut. A group is what makes 16 output columns.
struct PanelGrid {
  int64_t panel_bytes = 0;
  int64_t group_panels = 1;  // 2 for gate and up
  int64_t num_groups = 0;    // output columns / 16

  int64_t group_bytes() const { return panel_bytes * group_panels; }
  int64_t expert_bytes() const { return group_bytes() * num_groups; }
};

PanelGrid gate_up_grid(const ExpertOps& ops, const MoeProblem& p) {
  return {ops.panel_bytes(p.format, p.hidden_size), is_gated(p.activation.kind) ? 2 : 1,
          p.intermediate_size / kPanelRows};
}

PanelGrid down_grid(const ExpertOps& ops, const MoeProblem& p) {
  return {ops.panel_bytes(p.format, p.intermediate_size), 1, p.hidden_size / kPanelRows};
}

// A part of one expert's groups.
struct Chunk {
  int64_t expert = 0, first_group = 0, num_groups = 0;
};

// The experts of a batch that have rows, ascending.
std::span<const int64_t> active_experts(const ExpertBatch& batch, Arena& scratch) {
  int64_t* active = scratch.take<int64_t>(batch.num_experts);
  size_t n = 0;
  for (int64_t e = 0; e < batch.num_experts; ++e)
    if (batch.num_rows(e) > 0) active[n++] = e;
  return {active, n};
}

// Calls body(chunk) for all groups of the given experts. Each expert is cut into at least as many chunks as
// there are workers, where it has the groups, so that one busy expert occupies all of them.
template <class Body>
void for_chunks(const PanelGrid& grid, std::span<const int64_t> experts, ThreadPool& pool, const Body& body) {
  const int64_t share = (grid.num_groups + pool.num_threads() - 1) / pool.num_threads();
  const int64_t groups = std::clamp<int64_t>(kChunkBytes / grid.group_bytes(), 1, share);
  const int64_t per_expert = (grid.num_groups + groups - 1) / groups;
  pool.run(static_cast<int64_t>(experts.size()) * per_expert, [&](int64_t i, int) {
    const int64_t first = i % per_expert * groups;
    body(Chunk{experts[static_cast<size_t>(i / per_expert)], first,
               std::min(groups, grid.num_groups - first)});
  });
}

ActRows rows_of(const ActRows& all, const ExpertBatch& batch, int64_t expert) {
  const int64_t row_bytes = all.cols * dtype_bits(all.dtype) / 8;
  return {static_cast<uint8_t*>(all.data) + batch.first_row(expert) * row_bytes, all.dtype,
          batch.num_rows(expert), all.cols};
}

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

Result<PackedExperts> panels_pack(const RunnerRow& row, const MoeProblem& p, const MoeWeightsView& weights,
                                  ThreadPool& pool) {
  FP4MOE_RETURN_IF_ERROR(check_weights(p, weights));
  const ExpertOps& ops = row.ops();
  const PanelGrid gate_up = gate_up_grid(ops, p), down = down_grid(ops, p);
  PackedExperts packed;
  FP4MOE_ASSIGN_OR_RETURN(packed.gate_up, Buffer::make(p.num_experts * gate_up.expert_bytes()));
  FP4MOE_ASSIGN_OR_RETURN(packed.down, Buffer::make(p.num_experts * down.expert_bytes()));
  packed.gate_up_bias.resize(static_cast<size_t>(p.num_experts * p.intermediate_size * gate_up.group_panels));
  packed.down_bias.resize(static_cast<size_t>(p.num_experts * p.hidden_size));
  for (const ExpertWeightsView& w : weights.experts)
    packed.scales.push_back({w.gate.tensor_scale, w.up.tensor_scale, w.down.tensor_scale});

  pool.run(p.num_experts * gate_up.num_groups, [&](int64_t i, int) {
    pack_gate_up(ops, gate_up, weights.experts[static_cast<size_t>(i / gate_up.num_groups)],
                 i % gate_up.num_groups, packed.gate_up.data() + i * gate_up.group_bytes(),
                 packed.gate_up_bias.data() + i * gate_up.group_panels * kPanelRows);
  });
  pool.run(p.num_experts * down.num_groups, [&](int64_t i, int) {
    const ExpertWeightsView& w = weights.experts[static_cast<size_t>(i / down.num_groups)];
    ops.pack_panel(w.down, i % down.num_groups, packed.down.data() + i * down.panel_bytes);
    copy_bias(w.down_bias, 1, i % down.num_groups * kPanelRows, packed.down_bias.data() + i * kPanelRows);
  });
  return packed;
}

int64_t panels_scratch_bytes(const MoeProblem& p, int64_t max_rows) {
  return Arena::padded(p.num_experts * 8) +
         Arena::padded(max_rows * p.intermediate_size * dtype_bits(p.act_dtype) / 8);
}

void panels_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool) {
  const MoeProblem& p = args.problem;
  const ExpertBatch& batch = args.batch;
  const PackedExperts& experts = args.experts;
  const ExpertOps& ops = row.ops();
  const int64_t h_bytes = p.intermediate_size * dtype_bits(p.act_dtype) / 8;
  const ActRows h = {scratch.take<uint8_t>(batch.x.rows * h_bytes), p.act_dtype, batch.x.rows,
                     p.intermediate_size};

  const std::span<const int64_t> active = active_experts(batch, scratch);
  const PanelGrid gate_up = gate_up_grid(ops, p);
  for_chunks(gate_up, active, pool, [&](const Chunk& c) {
    const int64_t group = c.expert * gate_up.num_groups + c.first_group;
    const auto& scales = experts.scales[static_cast<size_t>(c.expert)];
    uint8_t* out = static_cast<uint8_t*>(rows_of(h, batch, c.expert).data) +
                   c.first_group * kPanelRows * (h_bytes / p.intermediate_size);
    ops.gate_up({.gemm = {.format = p.format,
                          .x = rows_of(batch.x, batch, c.expert),
                          .panels = experts.gate_up.data() + group * gate_up.group_bytes(),
                          .bias = experts.gate_up_bias.data() + group * gate_up.group_panels * kPanelRows,
                          .num_panels = c.num_groups * gate_up.group_panels,
                          .out_stride = p.intermediate_size},
                 .gate_scale = scales.gate,
                 .up_scale = scales.up,
                 .activation = p.activation,
                 .out = out});
  });

  const PanelGrid down = down_grid(ops, p);
  for_chunks(down, active, pool, [&](const Chunk& c) {
    const int64_t panel = c.expert * down.num_groups + c.first_group;
    ops.down({.gemm = {.format = p.format,
                       .x = rows_of(h, batch, c.expert),
                       .panels = experts.down.data() + panel * down.panel_bytes,
                       .bias = experts.down_bias.data() + panel * kPanelRows,
                       .num_panels = c.num_groups,
                       .out_stride = p.hidden_size},
              .scale = experts.scales[static_cast<size_t>(c.expert)].down,
              .out = batch.y + batch.first_row(c.expert) * p.hidden_size + c.first_group * kPanelRows});
  });
}

}  // namespace fp4moe
