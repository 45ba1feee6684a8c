// The routed experts of a MoE layer on a CPU: what is between the router and the residual.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/expert_weights.h"
#include "moe/plan.h"
#include "moe/table.h"
#include "moe/transport.h"

namespace fp4moe {

class RoutedExperts {
 public:
  // Packs this rank's part of the experts for the plan's runner, a CPU's. kDoesNotFit if memory is refused.
  static Result<RoutedExperts> make(const MoePlan& plan, const MoeWeightsView& weights, ThreadPool& pool);

  const PackedExperts& experts() const { return experts_; }
  // What run() takes from its arena, and gives back, of each of the transport's rounds.
  int64_t round_bytes(const Transport& transport) const;
  // After transport.begin(): runs the experts on each round's rows and sends the results back; out is
  // Transport::finish()'s.
  Status run(float* out, Transport& transport, Arena& scratch, ThreadPool& pool) const;

 private:
  MoeProblem problem_;
  const RunnerRow* runner_ = nullptr;
  PackedExperts experts_;
};

}  // namespace fp4moe
