#include "moe/shared_expert.h"

#include <span>

#include "base/check.h"

namespace fp4moe {

Shard shared_expert_shard(const MoePlan& plan, const MlpWeightsView& weights) {
  const RankLayout& layout = plan.problem().layout;
  const int64_t total = weights.intermediate_size;
  if (!plan.shared_expert_is_sharded()) return {0, total};
  return shard_blocks(total, dense_mlp_block(weights), layout.tp, layout.rank);
}

Result<SharedExpert> SharedExpert::make(const MoePlan& plan, const DenseOps& ops,
                                        const SharedExpertWeights& weights, ThreadPool& pool) {
  const int64_t h = plan.problem().hidden_size;
  const Shard shard = shared_expert_shard(plan, weights.mlp);
  auto mlp = DenseMlp::make(plan, ops, weights.mlp, shard, pool);
  if (!mlp.ok()) return mlp.status().with_context("shared expert");
  return of(std::move(*mlp), ops, weights.gate, h);
}

Result<SharedExpert> SharedExpert::of(std::unique_ptr<DenseMlp> mlp, const DenseOps& ops, const bf16* gate,
                                      int64_t hidden_size) {
  SharedExpert shared;
  shared.ops_ = &ops;
  shared.mlp_ = std::move(mlp);
  if (gate == nullptr) return shared;
  const std::span<const bf16> values(gate, static_cast<size_t>(hidden_size));
  FP4MOE_ASSIGN_OR_RETURN(shared.gate_, Buffer::copy_of(bf16_to_floats(values), ops.memory()));
  return shared;
}

void SharedExpert::forward_shared_expert(const ActRows& x, const float* router_x, float* out, Arena& scratch,
                                         ThreadPool& pool) const {
  const int64_t mark = scratch.used_bytes();
  mlp_->forward_mlp(x, out, scratch, pool);
  scratch.rewind(mark);
  if (gate_.num_bytes() > 0) ops_->sigmoid_gate({router_x, gate_.as<float>(), out, x.rows, x.cols}, pool);
}

AddedRows SharedExpert::forward_ungated(const ActRows& x, const float* router_x, Arena& scratch,
                                        ThreadPool& pool) const {
  AddedRows added = {.gate = gate(), .x = router_x};
  float* const rows = scratch.take<float>(x.rows * x.cols);
  const int64_t mark = scratch.used_bytes();
  if (auto* const rounded = reinterpret_cast<bf16*>(rows);
      mlp_->forward_mlp_rounded(x, rounded, scratch, pool)) {
    added.rows_bf16 = rounded;
  } else {
    mlp_->forward_mlp(x, rows, scratch, pool);
    added.rows = rows;
  }
  scratch.rewind(mark);
  return added;
}

}  // namespace fp4moe
