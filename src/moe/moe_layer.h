// One MoE layer: route -> dispatch -> run the experts -> combine, after an immutable plan.
#pragma once

#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/expert_weights.h"
#include "kernels/ops.h"
#include "moe/plan.h"
#include "moe/router.h"

namespace fp4moe {

struct MoeForwardArgs {
  ActRows x;                        // [T, H]: the experts' input, of the plan's activation type
  const float* router_x = nullptr;  // [T, H]: the same rows before any rounding, the router's input
  float* residual = nullptr;        // [T, H]: the layer's output is added to it
};

class MoeLayer {
 public:
  // Packs the experts' weights into the plan's layout (the source may be released afterwards) and copies the
  // router. kDoesNotFit if memory is refused.
  static Result<std::unique_ptr<MoeLayer>> make(const MoePlan& plan, const RouterWeights& router,
                                                const MoeWeightsView& weights, ThreadPool& pool);
  virtual ~MoeLayer() = default;

  // Bytes of scratch that forward() takes from the arena for up to max_tokens rows.
  virtual int64_t scratch_bytes(int64_t max_tokens) const = 0;
  virtual int64_t weight_bytes() const = 0;
  virtual void forward(const MoeForwardArgs& args, Arena& scratch, ThreadPool& pool) const = 0;
};

}  // namespace fp4moe
