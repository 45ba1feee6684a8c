// The CPU's panel runner. It has two parallel phases over an ExpertOps table's panels: gate/up with the
// activation, then down. w4a4 and w4a8 quantise the input rows before each phase. The threads share the
// chunks of all active experts.
#include <algorithm>
#include <span>

#include "base/check.h"
#include "base/run_ranges.h"
#include "kernels/act_quant.h"
#include "moe/host/panels.h"

namespace fp4moe {
namespace {

// A range of one expert's groups.
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

// Calls body(chunk) in parallel for all groups of the given experts, in chunks of about `chunk_bytes`. Each
// expert has at least as many chunks as there are threads, if it has enough groups, so that a single active
// expert occupies all threads.
template <class Body>
void for_chunks(const PanelGrid& grid, int64_t chunk_bytes, std::span<const int64_t> experts,
                ThreadPool& pool, const Body& body) {
  const int64_t share = (grid.num_groups + pool.num_threads() - 1) / pool.num_threads();
  const int64_t groups = std::clamp<int64_t>(chunk_bytes / grid.group_bytes(), 1, share);
  const int64_t per_expert = (grid.num_groups + groups - 1) / groups;
  const int64_t num_chunks = static_cast<int64_t>(experts.size()) * per_expert;
  run_in_streams(pool, num_chunks, [&](int64_t chunk) {
    const int64_t first = chunk % per_expert * groups;
    body(Chunk{experts[static_cast<size_t>(chunk / per_expert)], first,
               std::min(groups, grid.num_groups - first)});
  });
}

// The input of one of the two GEMMs: rows at the batch's positions, and the scale factors for their sums.
struct Operand {
  ActRows rows;
  const float* row_scales = nullptr;    // [rows]
  const float* block_scales = nullptr;  // [rows, K / block]
  const int32_t* block_starts = nullptr;
};

// The arguments of panels_run() and values derived from them.
struct PanelPass {
  const MoeProblem& p;
  const PackedExperts& experts;
  const ExpertBatch& batch;
  const ExpertOps& ops;
  Arena& scratch;
  ThreadPool& pool;
  int64_t intermediate;             // this rank's part of I
  std::span<const int64_t> active;  // experts that have rows

  const Numerics& numerics() const { return experts.numerics; }
  bool is(Scheme scheme) const { return numerics().scheme == scheme; }
  int64_t chunk_bytes(TacticOp op) const {
    int64_t rows = 0;
    for (const int64_t e : active) rows += batch.num_rows(e);
    const auto experts_with_rows = std::max<int64_t>(1, static_cast<int64_t>(active.size()));
    return experts.tactics.chunk_bytes(op, (rows + experts_with_rows - 1) / experts_with_rows);
  }
  const ExpertScales& scales(int64_t e) const { return experts.scales[static_cast<size_t>(e)]; }
};

int64_t row_bytes(const ActRows& rows) { return rows.cols * dtype_bits(rows.dtype) / 8; }

// `count` rows from row `first` on.
ActRows rows_from(const ActRows& all, int64_t first, int64_t count) {
  return {static_cast<uint8_t*>(all.data) + first * row_bytes(all), all.dtype, count, all.cols};
}

ActRows rows_of(const ActRows& all, const ExpertBatch& batch, int64_t expert) {
  return rows_from(all, batch.first_row(expert), batch.num_rows(expert));
}

ActRows take_rows(Arena& scratch, int64_t rows, int64_t cols, DType dtype) {
  return {scratch.take<uint8_t>(rows * cols * dtype_bits(dtype) / 8), dtype, rows, cols};
}

// The GEMM's view of one expert's rows.
ExpertGemmArgs gemm_args(const PanelPass& pass, const Operand& x, int64_t expert) {
  const int64_t first = pass.batch.first_row(expert), blocks = x.rows.cols / fp4_block(pass.p.format);
  return {.format = pass.p.format,
          .x = rows_of(x.rows, pass.batch, expert),
          .x_block_scales = x.block_scales == nullptr ? nullptr : x.block_scales + first * blocks,
          .x_block_starts = x.block_starts == nullptr ? nullptr : x.block_starts + first * blocks,
          .x_row_scales = x.row_scales == nullptr ? nullptr : x.row_scales + first};
}

// Calls body(expert, first row in the batch, number of rows) in parallel for pieces of the active experts.
template <class Body>
void for_row_pieces(const PanelPass& pass, const Body& body) {
  constexpr int64_t kRows = 8;
  int64_t most = 0;
  for (int64_t e : pass.active) most = std::max(most, pass.batch.num_rows(e));
  const int64_t pieces = (most + kRows - 1) / kRows;
  pass.pool.run(static_cast<int64_t>(pass.active.size()) * pieces, [&](int64_t i, int) {
    const int64_t e = pass.active[static_cast<size_t>(i / pieces)], first = i % pieces * kRows;
    const int64_t rows = std::min(kRows, pass.batch.num_rows(e) - first);
    if (rows > 0) body(e, pass.batch.first_row(e) + first, rows);
  });
}

// Quantises all rows of `x` into `out` (which may be x). scale_of(expert) is the static tensor scale.
template <class ScaleOf>
Operand quantize(const PanelPass& pass, const ActRows& x, const ActRows& out, ActQuantKind kind,
                 const ScaleOf& scale_of) {
  const bool int8 = kind == ActQuantKind::kInt8Block;
  const int block = int8 ? fp4_block(pass.p.format) : 16;
  const int64_t blocks = x.cols / block;
  const bool by_row = kind == ActQuantKind::kNvfp4PerToken || kind == ActQuantKind::kFp8PerToken;
  float* row_scales = by_row ? pass.scratch.take<float>(x.rows) : nullptr;
  float* block_scales = int8 ? pass.scratch.take<float>(x.rows * blocks) : nullptr;
  int32_t* block_starts = int8 ? pass.scratch.take<int32_t>(x.rows * blocks) : nullptr;
  for_row_pieces(pass, [&](int64_t e, int64_t first, int64_t rows) {
    quantize_act({.kind = kind,
                  .x = rows_from(x, first, rows),
                  .block = block,
                  .scale = scale_of(e),
                  .out = rows_from(out, first, rows),
                  .row_scales = row_scales == nullptr ? nullptr : row_scales + first,
                  .block_scales = int8 ? block_scales + first * blocks : nullptr,
                  .block_starts = int8 ? block_starts + first * blocks : nullptr});
  });
  return {out, row_scales, block_scales, block_starts};
}

// Storage type of quantised rows: INT8 codes as kI8; NVFP4 and FP8 values in the activation type.
DType quantised_dtype(const MoeProblem& p, const Numerics& n) {
  return n.scheme == Scheme::kW4A8 && !n.is_fp8() ? DType::kI8 : p.act_dtype;
}

ActQuantKind quant_kind(const PanelPass& pass, ActScaleChoice choice) {
  if (pass.numerics().is_fp8()) return ActQuantKind::kFp8PerToken;
  if (pass.is(Scheme::kW4A8)) return ActQuantKind::kInt8Block;
  return choice == ActScaleChoice::kPerToken ? ActQuantKind::kNvfp4PerToken : ActQuantKind::kNvfp4Static;
}

Operand input_operand(const PanelPass& pass) {
  const ExpertBatch& batch = pass.batch;
  const bool quantised = pass.is(Scheme::kW4A4);
  if (pass.is(Scheme::kW4A16) || (quantised && batch.x_is_nvfp4)) {
    // A scalar a1 is already part of the alphas, as if the rows had been quantised here.
    const bool in_alpha = quantised && pass.numerics().a1 == ActScaleChoice::kScalar;
    return {batch.x, in_alpha ? nullptr : batch.x_row_scales};
  }
  FP4MOE_CHECK(!quantised || batch.x_row_scales == nullptr, "rows with scales must be NVFP4");
  const ActRows out =
      take_rows(pass.scratch, batch.x.rows, batch.x.cols, quantised_dtype(pass.p, pass.numerics()));
  Operand x = quantize(pass, batch.x, out, quant_kind(pass, pass.numerics().a1),
                       [&](int64_t e) { return pass.scales(e).a1; });
  if (batch.x_row_scales == nullptr) return x;
  // w4a8 on NVFP4 rows: the rows' tensor scales must still be applied.
  if (x.row_scales == nullptr) {
    x.row_scales = batch.x_row_scales;
  } else {
    float* both = pass.scratch.take<float>(batch.x.rows);
    for_row_pieces(pass, [&](int64_t, int64_t first, int64_t rows) {
      for (int64_t r = first; r < first + rows; ++r) both[r] = x.row_scales[r] * batch.x_row_scales[r];
    });
    x.row_scales = both;
  }
  return x;
}

// Type of the intermediate before quantisation; with w4a16 the type that the down GEMM reads.
DType intermediate_dtype(const MoeProblem& p, const Numerics& n) {
  if (n.scheme == Scheme::kW4A16 || n.is_fp8()) return p.act_dtype;
  const bool through_bf16 = n.scheme == Scheme::kW4A4 && n.intermediate == IntermediateRounding::kBf16First;
  return through_bf16 ? DType::kBF16 : DType::kF32;
}

Operand intermediate_operand(const PanelPass& pass, const ActRows& h) {
  if (pass.is(Scheme::kW4A16)) return {h};
  const DType dtype = quantised_dtype(pass.p, pass.numerics());
  const ActRows out = h.dtype == dtype ? h : take_rows(pass.scratch, h.rows, h.cols, dtype);
  return quantize(pass, h, out, quant_kind(pass, pass.numerics().a2),
                  [&](int64_t e) { return pass.scales(e).a2; });
}

void run_gate_up(const PanelPass& pass, const Operand& x, const ActRows& h) {
  const PanelGrid grid = gate_up_grid(pass.ops, pass.p);
  for_chunks(grid, pass.chunk_bytes(TacticOp::kGateUp), pass.active, pass.pool, [&](const Chunk& c) {
    const int64_t group = c.expert * grid.num_groups + c.first_group;
    ExpertGemmArgs gemm = gemm_args(pass, x, c.expert);
    gemm.panels = pass.experts.gate_up.data() + group * grid.group_bytes();
    gemm.bias = pass.experts.gate_up_bias.data() + group * grid.group_panels * kPanelRows;
    gemm.num_panels = c.num_groups * grid.group_panels;
    gemm.out_stride = h.cols;
    uint8_t* out = static_cast<uint8_t*>(h.data) + pass.batch.first_row(c.expert) * row_bytes(h) +
                   c.first_group * kPanelRows * dtype_bits(h.dtype) / 8;
    pass.ops.gate_up({.gemm = gemm,
                      .gate_scale = pass.scales(c.expert).gate,
                      .up_scale = pass.scales(c.expert).up,
                      .activation = pass.p.activation,
                      .out = out,
                      .out_dtype = h.dtype});
  });
}

void run_down(const PanelPass& pass, const Operand& h) {
  const PanelGrid grid = down_grid(pass.ops, pass.p);
  for_chunks(grid, pass.chunk_bytes(TacticOp::kDown), pass.active, pass.pool, [&](const Chunk& c) {
    const int64_t panel = c.expert * grid.num_groups + c.first_group;
    ExpertGemmArgs gemm = gemm_args(pass, h, c.expert);
    gemm.panels = pass.experts.down.data() + panel * grid.panel_bytes;
    gemm.bias = pass.experts.down_bias.data() + panel * kPanelRows;
    gemm.num_panels = c.num_groups;
    gemm.out_stride = pass.p.hidden_size;
    pass.ops.down({.gemm = gemm,
                   .scale = pass.scales(c.expert).down,
                   .out = pass.batch.y + pass.batch.first_row(c.expert) * pass.p.hidden_size +
                          c.first_group * kPanelRows});
  });
}

// Scratch bytes of one quantised operand [rows, cols]: values and all kinds of scales.
int64_t quantised_bytes(const MoeProblem& p, const Numerics& n, int64_t rows, int64_t cols) {
  return Arena::padded(rows * cols * dtype_bits(quantised_dtype(p, n)) / 8) +
         2 * Arena::padded(rows * (cols / fp4_block(p.format)) * 4) + 2 * Arena::padded(rows * 4);
}

}  // namespace

int64_t panels_scratch_bytes(const MoeProblem& p, const Numerics& n, int64_t max_rows) {
  const int64_t intermediate = p.local_intermediate().count;
  int64_t bytes = Arena::padded(p.local_experts().count * 8) +
                  Arena::padded(max_rows * intermediate * dtype_bits(intermediate_dtype(p, n)) / 8);
  if (n.scheme != Scheme::kW4A16)
    bytes += quantised_bytes(p, n, max_rows, p.hidden_size) + quantised_bytes(p, n, max_rows, intermediate);
  return bytes;
}

void panels_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool) {
  const MoeProblem& p = args.problem;
  const PanelPass pass = {p,
                          args.experts,
                          args.batch,
                          row.ops(),
                          scratch,
                          pool,
                          p.local_intermediate().count,
                          active_experts(args.batch, scratch)};
  const ActRows h =
      take_rows(scratch, args.batch.x.rows, pass.intermediate, intermediate_dtype(p, pass.numerics()));
  run_gate_up(pass, input_operand(pass), h);
  run_down(pass, intermediate_operand(pass, h));
}

}  // namespace fp4moe
