// One MoE layer: route -> dispatch -> run the experts -> combine, after an immutable plan.
#pragma once

#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/expert_weights.h"
#include "kernels/ops.h"
#include "moe/expert_counters.h"
#include "moe/plan.h"
#include "moe/router.h"
#include "moe/transport.h"

namespace fp4moe {

struct MoeForwardArgs {
  int layer = 0;
  ActRows x;                        // [T, H]: the experts' input, of the plan's activation type
  const float* router_x = nullptr;  // [T, H]: the same rows before any rounding, the router's input
  float* residual = nullptr;        // [T, H]: the layer's output is added to it
  // What the layer makes x and router_x with, its two outputs, before all else; null: they are there.
  const RmsNormArgs* norm = nullptr;
  ExpertCounters* counters = nullptr;    // or null: counts where the routed rows go
  const int32_t* num_counted = nullptr;  // on a GPU, [1] in its memory: rows from there on are padding
  int32_t* expert_ids = nullptr;         // or null: [T, K], told where the routed rows go
};

// A shared expert and, where the model has one, the vector whose sigmoid scales it.
struct SharedExpertWeights {
  MlpWeightsView mlp;
  const bf16* gate = nullptr;  // [H] or null
};

class MoeLayer {
 public:
  // Packs this rank's part of the experts (and of the shared expert, if given) into the plan's layout; the
  // sources may be released afterwards. kDoesNotFit if memory is refused.
  static Result<std::unique_ptr<MoeLayer>> make(const MoePlan& plan, const DenseOps& ops,
                                                const RouterWeights& router, const MoeWeightsView& weights,
                                                const SharedExpertWeights* shared, ThreadPool& pool);
  virtual ~MoeLayer() = default;

  // Bytes of scratch that forward() takes from the arena for up to max_tokens rows of the group.
  virtual int64_t scratch_bytes(int64_t max_tokens, const Transport& transport) const = 0;
  virtual int64_t weight_bytes() const = 0;
  // The error is the job's: a peer that failed, disagreed or did not come in time.
  virtual Status forward(const MoeForwardArgs& args, Transport& transport, Arena& scratch,
                         ThreadPool& pool) const = 0;
};

}  // namespace fp4moe
