#include "moe/moe_layer.h"

#include <string>

#include "base/check.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

class PlannedLayer final : public MoeLayer {
 public:
  PlannedLayer(const MoePlan& plan, Router router, PackedExperts experts)
      : problem_(plan.problem()),
        a2a_(*plan.a2a()),
        runner_(*plan.runner()),
        router_(std::move(router)),
        experts_(std::move(experts)) {}

  int64_t scratch_bytes(int64_t max_tokens) const override {
    return router_.scratch_bytes(max_tokens) + a2a_.scratch_bytes(problem_, max_tokens) +
           runner_.scratch_bytes(problem_, max_tokens * problem_.top_k);
  }
  int64_t weight_bytes() const override { return router_.weight_bytes() + experts_.num_bytes(); }

  void forward(const MoeForwardArgs& args, Arena& scratch, ThreadPool& pool) const override {
    const MoeProblem& p = problem_;
    FP4MOE_CHECK(args.x.dtype == p.act_dtype && args.x.cols == p.hidden_size,
                 std::string("x is ") + dtype_name(args.x.dtype) + " with H=" + std::to_string(args.x.cols) +
                     ", the plan has " + dtype_name(p.act_dtype) +
                     " with H=" + std::to_string(p.hidden_size));
    const Routes routes = router_.route(args.router_x, args.x.rows, scratch, pool);
    const ExpertBatch batch = a2a_.dispatch({args.x, routes.ids, p.num_experts, p.top_k}, scratch, pool);
    runner_.run(runner_, {p, experts_, batch}, scratch, pool);
    a2a_.combine(batch, {routes.weights, args.x.rows, p.top_k, p.hidden_size, args.residual}, pool);
  }

 private:
  MoeProblem problem_;
  const A2aRow& a2a_;
  const RunnerRow& runner_;
  Router router_;
  PackedExperts experts_;
};

}  // namespace

Result<std::unique_ptr<MoeLayer>> MoeLayer::make(const MoePlan& plan, const RouterWeights& router,
                                                 const MoeWeightsView& weights, ThreadPool& pool) {
  FP4MOE_CHECK(plan.runner() != nullptr && plan.a2a() != nullptr, "the plan is empty");
  const MoeProblem& p = plan.problem();
  const RunnerRow& row = *plan.runner();
  FP4MOE_ASSIGN_OR_RETURN(Router gate,
                          Router::make(router, {p.num_experts, p.hidden_size, p.top_k}, row.ops()));
  FP4MOE_ASSIGN_OR_RETURN(PackedExperts experts, row.pack(row, p, weights, pool));
  return std::unique_ptr<MoeLayer>(std::make_unique<PlannedLayer>(plan, std::move(gate), std::move(experts)));
}

}  // namespace fp4moe
