// Fp4Linear: a linear layer with FP4 weights outside the experts (attention projections of some checkpoints),
// run by the plan's runner with the plan's scheme.
#pragma once

#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"
#include "kernels/ops.h"
#include "moe/plan/plan.h"

namespace fp4moe {

class Fp4Linear {
 public:
  // weights.fp4 is [N, K] with any N; pass a view for a shard. The source may be released afterwards.
  static Result<std::unique_ptr<Fp4Linear>> make(const MoePlan& plan, const LinearWeightsView& weights,
                                                 ThreadPool& pool);
  virtual ~Fp4Linear() = default;
  virtual int64_t scratch_bytes(int64_t max_tokens) const = 0;
  virtual int64_t weight_bytes() const = 0;
  // The first N columns of out [T, out_stride] f32 (+)= x [T, K] W^T + bias. T = 0 is allowed. out_stride is
  // in elements; on a GPU it must be N.
  virtual void forward_fp4_linear(const ActRows& x, float* out, int64_t out_stride, bool accumulate,
                                  Arena& scratch, ThreadPool& pool) const = 0;
  // Runs the norm, then out [T, N] f32 = normed rows W^T + bias, in one launch, and returns true;
  // norm.out_act is not written. Returns false without doing anything if the layer has no such launch for
  // these rows.
  virtual bool forward_normed_fp4(const RmsNormArgs& norm, float* out) const = 0;
};

}  // namespace fp4moe
