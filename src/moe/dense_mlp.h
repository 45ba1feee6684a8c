// DenseMlp: a gated MLP for all tokens: the shared expert, or the MLP of a layer without experts. FP4 weights
// run as one expert of the plan's runner (so schemes mean the same everywhere), bf16 and FP8 weights as dense
// GEMMs.
#pragma once

#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"
#include "kernels/ops.h"
#include "moe/plan/plan.h"

namespace fp4moe {

// Shards of the MLP's I must be multiples of this many columns, which divides I: I itself if that cannot be
// split. The same on every device.
int64_t dense_mlp_block(const MlpWeightsView& weights);

// The shard of an FP4 MLP's I as the only expert of a MoE layer.
MoeWeightsView mlp_as_expert(const MlpWeightsView& weights, Shard intermediate);

class DenseMlp {
 public:
  // Packs the shard [intermediate.first, + count) of the weights' I; with count 0, the output is zero
  // (kUnsupported on a GPU). The weights may be released afterwards. `ops` runs bf16 and FP8 weights;
  // plan.runner() runs FP4 weights under plan.numerics(), with the MLP's own input scales. kUnsupported for
  // biases or a mix of formats.
  static Result<std::unique_ptr<DenseMlp>> make(const MoePlan& plan, const DenseOps& ops,
                                                const MlpWeightsView& weights, Shard intermediate,
                                                ThreadPool& pool);
  virtual ~DenseMlp() = default;
  // bf16 weights, row-major, in the ops' memory; null: other weights, or all runs must pass forward_mlp().
  struct RowMajor {
    const bf16 *gate_up = nullptr, *down = nullptr;  // [2 I, H]: gate, then up; [H, I]
    int64_t intermediate_size = 0;                   // I
  };
  virtual RowMajor row_major() const { return {}; }
  virtual int64_t scratch_bytes(int64_t max_tokens) const = 0;
  virtual int64_t weight_bytes() const = 0;
  // out [T, H] f32 = this shard's part of the MLP's output for x [T, H]. T = 0 is allowed.
  virtual void forward_mlp(const ActRows& x, float* out, Arena& scratch, ThreadPool& pool) const = 0;
  // The same with the output rounded to bf16. Returns false, and does nothing, unless the kernels for many
  // tokens round it anyway.
  virtual bool forward_mlp_rounded(const ActRows&, bf16* /*out*/, Arena&, ThreadPool&) const { return false; }
};

}  // namespace fp4moe
