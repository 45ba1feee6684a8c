// The CPU's MoE layer: route, dispatch, run the experts, combine.

#include <algorithm>
#include <span>
#include <string>

#include "base/check.h"
#include "base/run_ranges.h"
#include "moe/moe_layer.h"
#include "moe/routed_experts.h"
#include "moe/shared_expert.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

constexpr int64_t kRowsPerChunk = 32;

ActRows row_range(const ActRows& x, Shard rows) {
  return {static_cast<uint8_t*>(x.data) + rows.first * x.cols * (dtype_bits(x.dtype) / 8), x.dtype,
          rows.count, x.cols};
}

class HostLayer final : public MoeLayer, public PlacedExperts {
 public:
  HostLayer(const MoePlan& plan, const DenseOps& ops, ExpertRouter router, RoutedExperts routed,
            SharedExpert shared)
      : ops_(ops),
        problem_(plan.problem()),
        splits_shared_rows_(plan.shared_expert_rows_are_split()),
        router_(std::move(router)),
        routed_(std::move(routed)),
        shared_(std::move(shared)),
        places_experts_(plan.places_experts()) {
    if (places_experts_) place(ExpertPlacement::trivial(problem_.placement_shape()));
  }

  int64_t scratch_bytes(int64_t max_tokens, const Transport& transport) const override {
    return router_.scratch_bytes(max_tokens) + Arena::padded(max_tokens * problem_.hidden_size * 4) +
           transport.scratch_bytes() +
           std::max(routed_.round_bytes(transport), shared_.scratch_bytes(max_tokens));
  }

  int64_t weight_bytes() const override {
    return router_.weight_bytes() + routed_.experts().num_bytes() + shared_.weight_bytes();
  }
  bool norms_with_router(int64_t) const override { return true; }

  PlacedExperts* placed_experts() override { return places_experts_ ? this : nullptr; }
  const ExpertPlacement& placement() const override { return placement_; }
  Status set_placement(ExpertPlacement placement) override {
    place(std::move(placement));
    return {};
  }
  int64_t expert_bytes() const override { return routed_.expert_bytes(); }
  Status read_expert(int64_t local, int64_t first, std::span<uint8_t> to) const override {
    routed_.read_expert(local, first, to);
    return {};
  }
  Status write_expert(int64_t local, int64_t first, std::span<const uint8_t> from) override {
    routed_.write_expert(local, first, from);
    return {};
  }
  Status finish_copies() override { return {}; }

  Status forward_moe(const MoeForwardArgs& args, Transport& transport, Arena& scratch,
                     ThreadPool& pool) const override {
    check_rows(args);
    if (args.norm != nullptr) ops_.rms_norm(*args.norm, pool);
    const int64_t h = problem_.hidden_size;
    const Shard own = transport.own_rows(args.x.rows);
    float* out = scratch.take<float>(args.x.rows * h);
    const Routes routes = router_.route(args.router_x + own.first * h, own.count, scratch, pool);
    if (counts(own, args.x.rows)) tell(args, own, routes);
    if (places_experts_) choose_replicas(own.count, routes);
    FP4MOE_RETURN_IF_ERROR(transport.begin(exchange_input(args, own, routes), scratch, pool));
    run_shared(args, own, out + own.first * h, scratch, pool);
    FP4MOE_RETURN_IF_ERROR(routed_.run_experts(out, transport, scratch, pool));
    ops_.add({out, args.residual, args.x.rows * h}, pool);
    return {};
  }

 private:
  void check_rows(const MoeForwardArgs& args) const {
    FP4MOE_CHECK(args.x.dtype == problem_.act_dtype && args.x.cols == problem_.hidden_size,
                 std::string("x is ") + dtype_name(args.x.dtype) + " with H=" + std::to_string(args.x.cols) +
                     ", but the plan has " + dtype_name(problem_.act_dtype) +
                     " with H=" + std::to_string(problem_.hidden_size));
  }

  void tell(const MoeForwardArgs& args, Shard own, const Routes& routes) const {
    const std::span<const int32_t> ids(routes.ids, static_cast<size_t>(own.count * problem_.top_k));
    if (args.counters != nullptr) args.counters->add(args.layer, ids);
    if (args.expert_ids != nullptr) std::ranges::copy(ids, args.expert_ids + own.first * problem_.top_k);
  }

  void place(ExpertPlacement placement) {
    placement_ = std::move(placement);
    replicas_ = placement_.table_of(problem_.layout.ep_rank());
  }

  // Replaces the logical experts of this rank's rows by physical ones.
  void choose_replicas(int64_t num_rows, const Routes& routes) const {
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t k = 0; k < problem_.top_k; ++k) {
        int32_t& id = routes.ids[row * problem_.top_k + k];
        id = replicas_.replica_of(id, row);
      }
  }

  // If every rank of the group routes all rows, only the first rank counts and reports them.
  bool counts(Shard own, int64_t group_rows) const {
    return own.count < group_rows || problem_.layout.attention_rank() == 0;
  }

  // NVFP4 rows on the wire are quantised as in w4a4, with the layer's scalar scale or with one scale per row.
  TransportInput exchange_input(const MoeForwardArgs& args, Shard own, const Routes& routes) const {
    const PackedExperts& experts = routed_.experts();
    const Numerics& n = experts.numerics;
    const bool has_scalar = n.scheme == Scheme::kW4A4 && n.a1 == ActScaleChoice::kScalar;
    return {.layer = args.layer,
            .group_rows = args.x.rows,
            .x = row_range(args.x, own),
            .ids = routes.ids,
            .weights = routes.weights,
            .nvfp4_per_token = !has_scalar,
            .nvfp4_scale = has_scalar ? experts.scales.front().a1 : EncodeScale{}};
  }

  // out [own rows, H] = the shared expert's output, or zero in rows for which this rank does not run it.
  void run_shared(const MoeForwardArgs& args, Shard own, float* out, Arena& scratch, ThreadPool& pool) const {
    const Shard rows = shared_rows(own);
    const int64_t h = problem_.hidden_size;
    const auto clear = [&](int64_t begin, int64_t end) {
      run_ranges(pool, end - begin, kRowsPerChunk, [&](int64_t first, int64_t last) {
        std::fill(out + (begin + first) * h, out + (begin + last) * h, 0.0f);
      });
    };
    clear(0, rows.first);
    clear(rows.first + rows.count, own.count);
    if (rows.count == 0) return;
    const Shard at = {own.first + rows.first, rows.count};
    shared_.forward_shared_expert(row_range(args.x, at), args.router_x + at.first * h, out + rows.first * h,
                                  scratch, pool);
  }

  // The part of this rank's rows for which it runs the shared expert.
  Shard shared_rows(Shard own) const {
    if (!shared_.exists()) return {};
    const RankLayout& layout = problem_.layout;
    if (!splits_shared_rows_) return {0, own.count};
    return shard_blocks(own.count, 1, layout.tp, layout.rank);
  }

  const DenseOps& ops_;
  MoeProblem problem_;
  bool splits_shared_rows_;
  ExpertRouter router_;
  RoutedExperts routed_;
  SharedExpert shared_;
  bool places_experts_;
  ExpertPlacement placement_;  // this and the next one: if places_experts_
  ReplicaTable replicas_;
};

}  // namespace

Result<std::unique_ptr<MoeLayer>> make_host_layer(const MoePlan& plan, const DenseOps& ops,
                                                  const RouterWeights& router, const MoeWeightsView& weights,
                                                  const SharedExpertWeights* shared, ThreadPool& pool) {
  const MoeProblem& p = plan.problem();
  FP4MOE_ASSIGN_OR_RETURN(
      ExpertRouter gate,
      ExpertRouter::make(router, {p.num_experts, p.hidden_size, p.top_k}, plan.runner()->ops()));
  FP4MOE_ASSIGN_OR_RETURN(RoutedExperts routed, RoutedExperts::make(plan, weights, pool));
  SharedExpert shared_expert;
  if (shared != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(shared_expert, SharedExpert::make(plan, ops, *shared, pool));
  }
  return std::unique_ptr<MoeLayer>(
      std::make_unique<HostLayer>(plan, ops, std::move(gate), std::move(routed), std::move(shared_expert)));
}

}  // namespace fp4moe
