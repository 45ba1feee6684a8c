// LinearLayer: y = x W^T + b with bf16 or FP4 weights, whichever the checkpoint has.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/expert_weights.h"
#include "kernels/ops.h"
#include "moe/fp4_linear.h"
#include "moe/plan.h"
#include "moe/rank_layout.h"

namespace fp4moe {

// The rows and columns that a rank has of a checkpoint's [N, K] matrix.
struct LinearPart {
  LinearWeightsView weights;
  std::vector<int64_t> rows;  // of N, in the order wanted (the bias follows them); empty: all, as they are
  Shard cols;                 // of K; count 0: all
};

class LinearLayer {
 public:
  LinearLayer() = default;
  // The parts one below the other; all of them have the same number of columns. Several parts must be bf16
  // (FP4 matrices have a tensor scale each). kUnsupported if `cols` cuts a scale block. The sources may be
  // released afterwards. `ops` is kept.
  static Result<LinearLayer> make(const MoePlan& plan, const DenseOps& ops, std::span<const LinearPart> parts,
                                  ThreadPool& pool);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t weight_bytes() const { return fp4_ ? fp4_->weight_bytes() : weight_.num_bytes(); }
  int64_t scratch_bytes(int64_t max_tokens) const { return fp4_ ? fp4_->scratch_bytes(max_tokens) : 0; }
  // out [T, N] f32 = x W^T + b, added to what it holds if `accumulate`. T = 0 is legal.
  void forward(const ActRows& x, float* out, bool accumulate, Arena& scratch, ThreadPool& pool) const;
  // The same of normed rows; what norm.out_act holds afterwards is unspecified.
  void forward_normed(const RmsNormArgs& norm, float* out, Arena& scratch, ThreadPool& pool) const;

 private:
  const DenseOps* ops_ = nullptr;
  Buffer weight_;  // bf16, in the layout and the memory of ops_; empty with FP4
  std::unique_ptr<Fp4Linear> fp4_;
  Buffer bias_;  // [N] f32 in the memory of ops_, or empty; with FP4 it is part of fp4_
  int64_t n_ = 0, k_ = 0;
};

}  // namespace fp4moe
