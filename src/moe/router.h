// The router: gate GEMM, scoring, top-k, renormalisation and scaling. Always in f32 on unquantised rows.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "formats/bf16.h"
#include "kernels/expert_ops.h"

namespace fp4moe {

// How logits become weights.
enum class RouterScoring : uint8_t {
  kTopkSoftmax,  // top-k of the logits, softmax over these k (gpt-oss); ties go to the lower expert id
};

struct RouterWeights {
  RouterScoring scoring = RouterScoring::kTopkSoftmax;
  const bf16* weight = nullptr;  // [E, H] row-major
  std::vector<float> bias;       // [E] or empty
};

struct RouterShape {
  int64_t num_experts = 0, hidden_size = 0, top_k = 0;
};

// Which experts a batch's tokens go to; memory of the arena that route() took it from.
struct Routes {
  int32_t* ids = nullptr;    // [T, K], best first, distinct, each in [0, E)
  float* weights = nullptr;  // [T, K]
};

class Router {
 public:
  // Copies the weights. kInvalidArgument for a bias of another length, kDoesNotFit if memory is refused.
  static Result<Router> make(const RouterWeights& weights, const RouterShape& shape, const ExpertOps& ops);

  // Bytes that route() takes from its arena for up to max_tokens rows.
  int64_t scratch_bytes(int64_t max_tokens) const;
  int64_t weight_bytes() const { return panels_.num_bytes(); }
  // x [T, H], f32.
  Routes route(const float* x, int64_t num_tokens, Arena& scratch, ThreadPool& pool) const;

 private:
  int64_t num_panels() const { return (shape_.num_experts + kPanelRows - 1) / kPanelRows; }

  RouterShape shape_;
  RouterScoring scoring_ = RouterScoring::kTopkSoftmax;
  const ExpertOps* ops_ = nullptr;
  Buffer panels_;            // [ceil(E / 16)][H][16] bf16, rows past E are zero
  std::vector<float> bias_;  // [ceil(E / 16) * 16]
};

// The shape.top_k largest of logits [E], ties to the lower id, and their softmax. A NaN logit ranks below
// every number, so it is chosen only where numbers run out; then the token's weights are NaN (its own output
// shows it), and the ids are still distinct and in range. Infinite logits follow IEEE arithmetic in the same
// way.
void topk_softmax(const float* logits, const RouterShape& shape, int32_t* ids, float* weights);

}  // namespace fp4moe
