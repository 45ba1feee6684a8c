// The runner of every CPU row: two parallel phases over the panels of an ExpertOps table, gate/up with the
// activation, then down. Chunks of both phases are handed out over all active experts.
#include <algorithm>
#include <span>

#include "base/check.h"
#include "moe/panels.h"

namespace fp4moe {
namespace {

// Weights of one chunk: large beside what handing a chunk out costs, small enough to stay in the L2 cache
// while an expert's rows pass over them.
constexpr int64_t kChunkBytes = 96 << 10;

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

}  // namespace

int64_t panels_scratch_bytes(const MoeProblem& p, const Numerics&, int64_t max_rows) {
  return Arena::padded(p.local_experts().count * 8) +
         Arena::padded(max_rows * p.local_intermediate().count * dtype_bits(p.act_dtype) / 8);
}

void panels_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool) {
  const MoeProblem& p = args.problem;
  const ExpertBatch& batch = args.batch;
  const PackedExperts& experts = args.experts;
  const ExpertOps& ops = row.ops();
  const int64_t intermediate = p.local_intermediate().count;
  const int64_t h_bytes = intermediate * dtype_bits(p.act_dtype) / 8;
  const ActRows h = {scratch.take<uint8_t>(batch.x.rows * h_bytes), p.act_dtype, batch.x.rows, intermediate};

  const std::span<const int64_t> active = active_experts(batch, scratch);
  const PanelGrid gate_up = gate_up_grid(ops, p);
  for_chunks(gate_up, active, pool, [&](const Chunk& c) {
    const int64_t group = c.expert * gate_up.num_groups + c.first_group;
    const ExpertScales& scales = experts.scales[static_cast<size_t>(c.expert)];
    uint8_t* out = static_cast<uint8_t*>(rows_of(h, batch, c.expert).data) +
                   c.first_group * kPanelRows * (h_bytes / intermediate);
    ops.gate_up({.gemm = {.format = p.format,
                          .x = rows_of(batch.x, batch, c.expert),
                          .panels = experts.gate_up.data() + group * gate_up.group_bytes(),
                          .bias = experts.gate_up_bias.data() + group * gate_up.group_panels * kPanelRows,
                          .num_panels = c.num_groups * gate_up.group_panels,
                          .out_stride = intermediate},
                 .gate_scale = scales.gate,
                 .up_scale = scales.up,
                 .activation = p.activation,
                 .out = out,
                 .out_dtype = p.act_dtype});
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
