#include "moe/moe_layer.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/run_ranges.h"
#include "moe/dense_mlp.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

constexpr int64_t kRowsPerChunk = 32;

ActRows row_range(const ActRows& x, Shard rows) {
  return {static_cast<uint8_t*>(x.data) + rows.first * x.cols * (dtype_bits(x.dtype) / 8), x.dtype,
          rows.count, x.cols};
}

// A shared expert's part on this rank, and the gate that scales it.
struct SharedExpert {
  std::unique_ptr<DenseMlp> mlp;  // null: the layer has none
  std::vector<float> gate;        // [H] or empty
};

class PlannedLayer final : public MoeLayer {
 public:
  PlannedLayer(const MoePlan& plan, Router router, PackedExperts experts, SharedExpert shared)
      : problem_(plan.problem()),
        runner_(*plan.runner()),
        router_(std::move(router)),
        experts_(std::move(experts)),
        shared_(std::move(shared)) {}

  int64_t scratch_bytes(int64_t max_tokens, const Transport& transport) const override {
    const int64_t round = runner_.scratch_bytes(problem_, experts_.numerics, transport.max_batch_rows());
    const int64_t shared = shared_.mlp == nullptr ? 0 : shared_.mlp->scratch_bytes(max_tokens);
    return router_.scratch_bytes(max_tokens) + Arena::padded(max_tokens * problem_.hidden_size * 4) +
           transport.scratch_bytes() + std::max(round, shared);
  }

  int64_t weight_bytes() const override {
    return router_.weight_bytes() + experts_.num_bytes() +
           (shared_.mlp == nullptr ? 0 : shared_.mlp->weight_bytes());
  }

  Status forward(const MoeForwardArgs& args, Transport& transport, Arena& scratch,
                 ThreadPool& pool) const override {
    check_rows(args);
    const int64_t h = problem_.hidden_size;
    const Shard own = transport.own_rows(args.x.rows);
    float* out = scratch.take<float>(args.x.rows * h);
    const Routes routes = router_.route(args.router_x + own.first * h, own.count, scratch, pool);
    FP4MOE_RETURN_IF_ERROR(transport.begin(exchange_input(args, own, routes), scratch, pool));
    run_shared(args, own, out + own.first * h, scratch, pool);
    const int64_t before_rounds = scratch.used_bytes();
    for (;;) {
      ExpertBatch batch;
      FP4MOE_ASSIGN_OR_RETURN(const bool more, transport.next(batch, scratch, pool));
      if (!more) break;
      runner_.run(runner_, {problem_, experts_, batch}, scratch, pool);
      FP4MOE_RETURN_IF_ERROR(transport.combine(batch, scratch, pool));
      scratch.rewind(before_rounds);
    }
    FP4MOE_RETURN_IF_ERROR(transport.finish(out, pool));
    run_ranges(pool, args.x.rows, kRowsPerChunk, [&](int64_t first, int64_t last) {
      for (int64_t i = first * h; i < last * h; ++i) args.residual[i] += out[i];
    });
    return {};
  }

 private:
  void check_rows(const MoeForwardArgs& args) const {
    FP4MOE_CHECK(args.x.dtype == problem_.act_dtype && args.x.cols == problem_.hidden_size,
                 std::string("x is ") + dtype_name(args.x.dtype) + " with H=" + std::to_string(args.x.cols) +
                     ", the plan has " + dtype_name(problem_.act_dtype) +
                     " with H=" + std::to_string(problem_.hidden_size));
  }

  // A payload of NVFP4 rows is what w4a4 would make of them; without one scale for the layer, rows get their
  // own.
  TransportInput exchange_input(const MoeForwardArgs& args, Shard own, const Routes& routes) const {
    const Numerics& n = experts_.numerics;
    const bool has_scalar = n.scheme == Scheme::kW4A4 && n.a1 == ActScaleChoice::kScalar;
    return {.layer = args.layer,
            .group_rows = args.x.rows,
            .x = row_range(args.x, own),
            .ids = routes.ids,
            .weights = routes.weights,
            .nvfp4_per_token = !has_scalar,
            .nvfp4_scale = has_scalar ? experts_.scales.front().a1 : EncodeScale{}};
  }

  // out [own rows, H] = the shared expert's output, or zeros. Nothing to do for a rank without rows.
  void run_shared(const MoeForwardArgs& args, Shard own, float* out, Arena& scratch, ThreadPool& pool) const {
    if (own.count == 0) return;
    const int64_t h = problem_.hidden_size;
    if (shared_.mlp == nullptr) {
      run_ranges(pool, own.count, kRowsPerChunk,
                 [&](int64_t first, int64_t last) { std::fill(out + first * h, out + last * h, 0.0f); });
      return;
    }
    const int64_t mark = scratch.used_bytes();
    shared_.mlp->forward(row_range(args.x, own), out, scratch, pool);
    scratch.rewind(mark);
    if (shared_.gate.empty()) return;
    run_ranges(pool, own.count, kRowsPerChunk, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) scale_by_gate(args.router_x + (own.first + t) * h, out + t * h);
    });
  }

  void scale_by_gate(const float* x, float* out) const {
    double logit = 0;
    for (int64_t i = 0; i < problem_.hidden_size; ++i)
      logit += static_cast<double>(x[i]) * shared_.gate[static_cast<size_t>(i)];
    const auto scale = static_cast<float>(1 / (1 + std::exp(-logit)));
    for (int64_t i = 0; i < problem_.hidden_size; ++i) out[i] *= scale;
  }

  MoeProblem problem_;
  const RunnerRow& runner_;
  Router router_;
  PackedExperts experts_;
  SharedExpert shared_;
};

// A rank whose output is a partial sum of all ranks' has a shard of the shared expert, others all of it.
Result<SharedExpert> make_shared_expert(const MoePlan& plan, const DenseOps& ops,
                                        const SharedExpertWeights& weights, ThreadPool& pool) {
  const RankLayout& layout = plan.problem().layout;
  const int64_t total = weights.mlp.intermediate_size;
  const Shard shard = plan.shared_expert_is_sharded()
                          ? shard_blocks(total, dense_mlp_block(weights.mlp), layout.tp, layout.rank)
                          : Shard{0, total};
  SharedExpert shared;
  auto mlp = DenseMlp::make(plan, ops, weights.mlp, shard, pool);
  if (!mlp.ok()) return mlp.status().with_context("shared expert");
  shared.mlp = std::move(*mlp);
  for (int64_t i = 0; weights.gate != nullptr && i < plan.problem().hidden_size; ++i)
    shared.gate.push_back(bf16_to_float(weights.gate[i]));
  return shared;
}

}  // namespace

Result<std::unique_ptr<MoeLayer>> MoeLayer::make(const MoePlan& plan, const DenseOps& ops,
                                                 const RouterWeights& router, const MoeWeightsView& weights,
                                                 const SharedExpertWeights* shared, ThreadPool& pool) {
  FP4MOE_CHECK(plan.runner() != nullptr && plan.a2a() != nullptr, "the plan is empty");
  const MoeProblem& p = plan.problem();
  const RunnerRow& row = *plan.runner();
  FP4MOE_ASSIGN_OR_RETURN(Router gate,
                          Router::make(router, {p.num_experts, p.hidden_size, p.top_k}, row.ops()));
  FP4MOE_ASSIGN_OR_RETURN(PackedExperts experts, row.pack(row, p, plan.numerics(), weights, pool));
  experts.tactics = plan.tactics();
  SharedExpert shared_expert;
  if (shared != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(shared_expert, make_shared_expert(plan, ops, *shared, pool));
  }
  return std::unique_ptr<MoeLayer>(
      std::make_unique<PlannedLayer>(plan, std::move(gate), std::move(experts), std::move(shared_expert)));
}

}  // namespace fp4moe
