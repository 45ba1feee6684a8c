#include "moe/dense_mlp.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "moe/dense_weight.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

// An empty shard: its part of the output is zero.
class EmptyMlp final : public DenseMlp {
 public:
  explicit EmptyMlp(int64_t hidden_size) : hidden_size_(hidden_size) {}
  int64_t scratch_bytes(int64_t) const override { return 0; }
  int64_t weight_bytes() const override { return 0; }
  void forward_mlp(const ActRows& x, float* out, Arena&, ThreadPool&) const override {
    std::fill_n(out, x.rows * hidden_size_, 0.0f);
  }

 private:
  int64_t hidden_size_;
};

// FP4 weights, as one expert of the plan's runner.
class Fp4Mlp final : public DenseMlp {
 public:
  Fp4Mlp(const RunnerRow& runner, const MoeProblem& problem, PackedExperts experts)
      : runner_(runner), problem_(problem), experts_(std::move(experts)) {}

  int64_t scratch_bytes(int64_t max_tokens) const override {
    return Arena::padded(2 * 8) + runner_.scratch_bytes(problem_, experts_.numerics, max_tokens);
  }
  int64_t weight_bytes() const override { return experts_.num_bytes(); }
  void forward_mlp(const ActRows& x, float* out, Arena& scratch, ThreadPool& pool) const override {
    int64_t* offsets = scratch.take<int64_t>(2);
    offsets[0] = 0;
    offsets[1] = x.rows;
    const ExpertBatch batch{.num_experts = 1, .offsets = offsets, .x = x, .y = out};
    runner_.run(runner_, {problem_, experts_, batch}, scratch, pool);
  }

 private:
  const RunnerRow& runner_;
  MoeProblem problem_;
  PackedExperts experts_;
};

// bf16 or FP8 weights; gate and up are one GEMM.
class GemmMlp final : public DenseMlp {
 public:
  GemmMlp(const DenseOps& ops, DType act_dtype, int64_t intermediate)
      : ops_(ops), act_dtype_(act_dtype), intermediate_(intermediate), amax_(new_amax(1)) {}

  Status pack(const MlpWeightsView& w, Shard shard, ThreadPool& pool) {
    const std::vector<int64_t> rows = row_range(shard.first, shard.count);
    const LinearPart gate_up[] = {{w.gate, rows, {}}, {w.up, rows, {}}}, down[] = {{w.down, {}, shard}};
    FP4MOE_ASSIGN_OR_RETURN(gate_up_, DenseWeight::make(ops_, gate_up, pool));
    FP4MOE_ASSIGN_OR_RETURN(down_, DenseWeight::make(ops_, down, pool));
    return {};
  }

  int64_t scratch_bytes(int64_t max_tokens) const override {
    return Arena::padded(max_tokens * 2 * intermediate_ * 4) +
           Arena::padded(max_tokens * intermediate_ * dtype_bits(act_dtype_) / 8);
  }
  int64_t weight_bytes() const override { return gate_up_.num_bytes() + down_.num_bytes(); }
  RowMajor row_major() const override {
    if (ops_.linear_layout != LinearLayout::kRowMajor || amax_ != nullptr) return {};
    const bf16 *gate_up = gate_up_.bf16_values(), *down = down_.bf16_values();
    if (gate_up == nullptr || down == nullptr) return {};
    return {gate_up, down, intermediate_};
  }
  void forward_mlp(const ActRows& x, float* out, Arena& scratch, ThreadPool& pool) const override {
    float* gate_up = scratch.take<float>(x.rows * 2 * intermediate_);
    const ActRows h = {scratch.take<uint8_t>(x.rows * intermediate_ * dtype_bits(act_dtype_) / 8), act_dtype_,
                       x.rows, intermediate_};
    ops_.linear(gate_up_.args(x, nullptr, gate_up, false), pool);
    ops_.silu_mul({gate_up, h}, pool);
    ops_.linear(down_.args(h, nullptr, out, false), pool);
    if (amax_ == nullptr) return;
    take_amax(x, amax_->input[0]);
    take_amax(h, amax_->intermediate[0]);
  }

 private:
  const DenseOps& ops_;
  DType act_dtype_;
  int64_t intermediate_;
  DenseWeight gate_up_;               // [2 I, H]: gate, then up
  DenseWeight down_;                  // [H, I]
  std::shared_ptr<ExpertAmax> amax_;  // null outside calibration
};

const char* kind_of(const LinearWeightsView& w) { return w.is_fp4 ? "FP4" : w.is_fp8() ? "FP8" : "bf16"; }

Status check_linear(const LinearWeightsView& w, const char* name, int64_t n, int64_t k,
                    const LinearWeightsView& gate) {
  const bool is_fp4 = gate.is_fp4;
  if (w.bias != nullptr)
    return unsupported(std::string(name) + " has a bias, which a gated MLP does not support");
  if (w.is_fp4 != is_fp4 || w.is_fp8() != gate.is_fp8())
    return unsupported(std::string(name) + " is " + kind_of(w) + ", but gate is " + kind_of(gate) +
                       "; the matrices of an MLP must be all FP4, all FP8 or all bf16");
  const int64_t rows = is_fp4 ? w.fp4.rows : w.n, cols = is_fp4 ? w.fp4.cols : w.k;
  if (rows == n && cols == k) return {};
  return invalid_argument(std::string(name) + " is [" + std::to_string(rows) + ", " + std::to_string(cols) +
                          "]; expected [" + std::to_string(n) + ", " + std::to_string(k) + "]");
}

}  // namespace

int64_t dense_mlp_block(const MlpWeightsView& weights) {
  constexpr int64_t kTileRows = 32;  // of gate and of up in a GPU's tile
  if (weights.gate.is_fp4)
    return weights.intermediate_size % kTileRows == 0 ? kTileRows : fp4_block(weights.gate.fp4.format);
  const bool has_fp8_blocks = weights.down.is_fp8() && weights.down.fp8.col_block < weights.intermediate_size;
  // A width that is no multiple of the step cannot be split, but fits in one shard.
  if (has_fp8_blocks && weights.intermediate_size % kFp8ColumnStep == 0) return kFp8ColumnStep;
  return weights.intermediate_size % kPanelRows == 0 ? kPanelRows : weights.intermediate_size;
}

MoeWeightsView mlp_as_expert(const MlpWeightsView& w, Shard shard) {
  ExpertWeightsView expert;
  expert.gate = row_slice(w.gate.fp4, shard.first, shard.count);
  expert.up = row_slice(w.up.fp4, shard.first, shard.count);
  expert.down = column_slice(w.down.fp4, shard.first, shard.count);
  expert.gate_input_scale = w.gate.input_scale;
  expert.up_input_scale = w.up.input_scale;
  expert.down_input_scale = w.down.input_scale;
  return {w.gate.fp4.format, w.hidden_size, shard.count, {expert}};
}

Result<std::unique_ptr<DenseMlp>> DenseMlp::make(const MoePlan& plan, const DenseOps& ops,
                                                 const MlpWeightsView& w, Shard shard, ThreadPool& pool) {
  FP4MOE_CHECK(plan.runner() != nullptr, "the plan is empty");
  const int64_t h = w.hidden_size, n = w.intermediate_size;
  const bool is_fp4 = w.gate.is_fp4;
  FP4MOE_RETURN_IF_ERROR(check_linear(w.gate, "gate", n, h, w.gate));
  FP4MOE_RETURN_IF_ERROR(check_linear(w.up, "up", n, h, w.gate));
  FP4MOE_RETURN_IF_ERROR(check_linear(w.down, "down", h, n, w.gate));
  MoeProblem p = plan.problem();
  if (shard.count == 0 && p.device == DeviceKind::kCuda)
    return unsupported("I = " + std::to_string(n) + " has fewer blocks of " +
                       std::to_string(dense_mlp_block(w)) +
                       " than there are ranks, which a GPU does not run; nearest legal choice: fewer ranks");
  if (shard.count == 0) return std::unique_ptr<DenseMlp>(std::make_unique<EmptyMlp>(h));
  if (!is_fp4) {
    auto mlp = std::make_unique<GemmMlp>(ops, p.act_dtype, shard.count);
    FP4MOE_RETURN_IF_ERROR(mlp->pack(w, shard, pool));
    return std::unique_ptr<DenseMlp>(std::move(mlp));
  }
  p.hidden_size = h;
  p.intermediate_size = shard.count;
  p.num_experts = p.top_k = 1;
  p.num_redundant = 0;
  p.format = w.gate.fp4.format;
  p.activation = {ActivationKind::kSilu};
  p.layout = {};
  if (plan.scheme() == Scheme::kW4A4 && p.format == Fp4Format::kMxfp4)
    return unsupported(
        "an mxfp4 MLP has no activation scales for w4a4; nearest legal choice: --fp4-compute w4a16");
  return plan.runner()->layers->mlp(plan, p, mlp_as_expert(w, shard), pool);
}

Result<std::unique_ptr<DenseMlp>> make_host_mlp(const MoePlan& plan, const MoeProblem& problem,
                                                const MoeWeightsView& weights, ThreadPool& pool) {
  const RunnerRow& row = *plan.runner();
  FP4MOE_ASSIGN_OR_RETURN(PackedExperts experts, row.pack(row, problem, plan.numerics(), weights, pool));
  return std::unique_ptr<DenseMlp>(std::make_unique<Fp4Mlp>(row, problem, std::move(experts)));
}

}  // namespace fp4moe
