#include "moe/moe_layer.h"

#include "base/check.h"
#include "moe/table.h"

namespace fp4moe {

Result<std::unique_ptr<MoeLayer>> MoeLayer::make(const MoePlan& plan, const DenseOps& ops,
                                                 const RouterWeights& router, const MoeWeightsView& weights,
                                                 const SharedExpertWeights* shared, ThreadPool& pool) {
  FP4MOE_CHECK(plan.runner() != nullptr && plan.a2a() != nullptr, "the plan is empty");
  return plan.runner()->layers->moe(plan, ops, router, weights, shared, pool);
}

}  // namespace fp4moe
