#include "moe/routed_experts.h"

#include <utility>

#include "base/check.h"

namespace fp4moe {

Result<RoutedExperts> RoutedExperts::make(const MoePlan& plan, const MoeWeightsView& weights,
                                          ThreadPool& pool) {
  RoutedExperts routed;
  routed.problem_ = plan.problem();
  routed.runner_ = plan.runner();
  FP4MOE_ASSIGN_OR_RETURN(
      routed.experts_, routed.runner_->pack(*routed.runner_, plan.problem(), plan.numerics(), weights, pool));
  routed.experts_.tactics = plan.tactics();
  return routed;
}

int64_t RoutedExperts::round_bytes(const Transport& transport) const {
  return runner_->scratch_bytes(problem_, experts_.numerics, transport.max_batch_rows());
}

Status RoutedExperts::run_experts(float* out, Transport& transport, Arena& scratch, ThreadPool& pool) const {
  const int64_t before_rounds = scratch.used_bytes();
  for (;;) {
    ExpertBatch batch;
    FP4MOE_ASSIGN_OR_RETURN(const bool more, transport.next(batch, scratch, pool));
    if (!more) break;
    runner_->run(*runner_, {problem_, experts_, batch}, scratch, pool);
    FP4MOE_RETURN_IF_ERROR(transport.combine(batch, scratch, pool));
    scratch.rewind(before_rounds);
  }
  return transport.finish(out, pool);
}

}  // namespace fp4moe
