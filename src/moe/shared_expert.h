// SharedExpert: the MLP of a MoE layer that runs for every token. If the model has a gate, it scales the
// output.
#pragma once

#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/device_moe.h"
#include "kernels/ops.h"
#include "moe/dense_mlp.h"
#include "moe/moe_layer.h"
#include "moe/plan/plan.h"

namespace fp4moe {

// This rank's part of the shared expert's I: a shard if MoePlan::shared_expert_is_sharded(), else all of it.
Shard shared_expert_shard(const MoePlan& plan, const MlpWeightsView& weights);

class SharedExpert {
 public:
  SharedExpert() = default;  // for layers without a shared expert
  // Packs this rank's part. The source may be released afterwards.
  static Result<SharedExpert> make(const MoePlan& plan, const DenseOps& ops,
                                   const SharedExpertWeights& weights, ThreadPool& pool);

  // The same with an MLP that computes the whole shared expert.
  static Result<SharedExpert> of(std::unique_ptr<DenseMlp> mlp, const DenseOps& ops, const bf16* gate,
                                 int64_t hidden_size);

  bool exists() const { return mlp_ != nullptr; }
  const float* gate() const { return gate_.as<float>(); }             // [H] in the ops' memory, or null
  DenseMlp::RowMajor row_major() const { return mlp_->row_major(); }  // precondition: exists()
  int64_t scratch_bytes(int64_t max_tokens) const { return exists() ? mlp_->scratch_bytes(max_tokens) : 0; }
  int64_t weight_bytes() const { return exists() ? mlp_->weight_bytes() : 0; }
  // out [T, H] f32 = the output for x [T, H]; router_x [T, H] f32: the gate's input. Precondition: exists().
  void forward_shared_expert(const ActRows& x, const float* router_x, float* out, Arena& scratch,
                             ThreadPool& pool) const;
  // The same in two steps: computes the output without the gate in scratch memory, which stays taken, and
  // returns the arguments with which another op applies the gate and adds the rows.
  AddedRows forward_ungated(const ActRows& x, const float* router_x, Arena& scratch, ThreadPool& pool) const;

 private:
  const DenseOps* ops_ = nullptr;
  std::unique_ptr<DenseMlp> mlp_;
  Buffer gate_;  // [H] f32 in ops_->memory(), or empty
};

}  // namespace fp4moe
