// LinearLayer: y = x W^T + b with bf16, Q8, FP8 or FP4 weights. Q8 weights are made from a checkpoint's bf16
// weights.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"
#include "kernels/ops.h"
#include "moe/dense_weight.h"
#include "moe/fp4_linear.h"
#include "moe/plan/plan.h"

namespace fp4moe {

// Runs the norm unless norm.is_done.
void run_norm(const DenseOps& ops, const RmsNormArgs& norm, ThreadPool& pool);

class LinearLayer {
 public:
  LinearLayer() = default;
  // Stacks the parts, which must have the same number of columns. Several parts must all be bf16 or all be
  // FP8, because each FP4 matrix has its own tensor scale. kUnsupported if `cols` splits a scale block (FP8:
  // see DenseWeight). The sources may be released afterwards; `ops` must outlive the layer.
  static Result<LinearLayer> make(const MoePlan& plan, const DenseOps& ops, std::span<const LinearPart> parts,
                                  ThreadPool& pool);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t weight_bytes() const { return fp4_ ? fp4_->weight_bytes() : weight_.num_bytes(); }
  int64_t scratch_bytes(int64_t max_tokens) const { return fp4_ ? fp4_->scratch_bytes(max_tokens) : 0; }
  // The weights, for prefetches; none with FP4.
  WeightBytes bytes() const { return fp4_ ? WeightBytes() : weight_.bytes(); }
  // out [T, N] f32 (+)= x W^T + b. T may be 0.
  // `send`: see LinearArgs.
  void forward_linear(const ActRows& x, float* out, bool accumulate, Arena& scratch, ThreadPool& pool,
                      PartialsToSend* send = nullptr) const;
  // Runs the norm, then out = normed rows W^T + b. norm.out_act is unspecified afterwards.
  void forward_normed(const RmsNormArgs& norm, float* out, Arena& scratch, ThreadPool& pool) const;
  struct Output {
    const LinearLayer* layer;
    float* out;  // [T, N]
  };
  // The same for several layers with the same ops.
  static void forward_all_normed(const RmsNormArgs& norm, std::span<const Output> outputs, Arena& scratch,
                                 ThreadPool& pool);

 private:
  const DenseOps* ops_ = nullptr;
  DenseWeight weight_;  // empty with FP4
  std::unique_ptr<Fp4Linear> fp4_;
  Buffer bias_;  // [N] f32 in ops_' memory, or empty; with FP4 it is part of fp4_
  int64_t n_ = 0, k_ = 0;
};

}  // namespace fp4moe
