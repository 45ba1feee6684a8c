// GPU layers: a rank's part of a MoE layer, enqueued on the current stream, without a Transport or readback;
// a gated MLP, run as a layer with one expert; an FP4 linear layer.
#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "device/device_memory.h"
#include "device/side_stream.h"
#include "device/stream.h"
#include "kernels/device_a2a.h"
#include "moe/device/device_exchange.h"
#include "moe/device/device_expert_runner.h"
#include "moe/device/device_pass.h"
#include "moe/device/device_router.h"
#include "moe/shared_expert.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

// From this many rows on, kernels fill the GPU: nothing is gained from running two at a time, and a pass over
// the rows takes much longer than a launch.
constexpr int64_t kManyRows = 1024;

// The experts of a layer.
struct LayerExperts {
  DeviceExpertRunner routed;
  SharedExpert shared;
  bool shared_follows = false;  // shared's weights are in the memory of routed's, after theirs
};

// A placement whose table of replicas is in device memory, at addresses that graphs keep.
class DevicePlacement {
 public:
  static Result<DevicePlacement> make(const PlacementShape& shape, int rank) {
    DevicePlacement made;
    made.rank_ = rank;
    FP4MOE_ASSIGN_OR_RETURN(made.first_, Buffer::make((shape.num_logical + 1) * kInt, device_memory()));
    FP4MOE_ASSIGN_OR_RETURN(made.replicas_, Buffer::make(shape.num_physical * kInt, device_memory()));
    FP4MOE_RETURN_IF_ERROR(made.set(ExpertPlacement::trivial(shape)));
    return made;
  }
  const ExpertPlacement& placement() const { return placement_; }
  Status set(ExpertPlacement placement) {
    placement_ = std::move(placement);
    const ReplicaTable table = placement_.table_of(rank_);
    FP4MOE_RETURN_IF_ERROR(device_memory().upload(first_.data(), table.first.data(), first_.num_bytes()));
    return device_memory().upload(replicas_.data(), table.replicas.data(), std::ssize(table.replicas) * kInt);
  }
  A2aReplicas table() const {
    return {first_.as<int32_t>(), replicas_.as<int32_t>(), placement_.shape().num_logical, rank_};
  }

 private:
  static constexpr int64_t kInt = sizeof(int32_t);
  ExpertPlacement placement_;
  int rank_ = 0;
  Buffer first_, replicas_;
};

class DeviceLayer final : public MoeLayer, public PlacedExperts {
 public:
  DeviceLayer(const MoePlan& plan, const DenseOps& dense, DeviceRouter router, LayerExperts experts,
              std::optional<DevicePlacement> placement)
      : plan_(plan),
        dense_(dense),
        ops_(plan_.device_ops()),
        router_(std::move(router)),
        experts_(std::move(experts.routed)),
        shared_(std::move(experts.shared)),
        shared_follows_(experts.shared_follows),
        placement_(std::move(placement)) {}

  PlacedExperts* placed_experts() override { return placement_ ? this : nullptr; }
  const ExpertPlacement& placement() const override { return placement_->placement(); }
  Status set_placement(ExpertPlacement placement) override { return placement_->set(std::move(placement)); }
  int64_t expert_bytes() const override { return experts_.experts().expert_bytes(); }
  Status read_expert(int64_t local, int64_t first, std::span<uint8_t> to) const override {
    experts_.experts().read_expert(local, first, to);
    return {};
  }
  Status write_expert(int64_t local, int64_t first, std::span<const uint8_t> from) override {
    experts_.experts().write_expert(local, first, from);
    return {};
  }
  Status finish_copies() override { return current_stream().synchronize(); }

  int64_t scratch_bytes(int64_t max_tokens, const Transport&) const override {
    const int64_t out = shared_.exists() ? Arena::padded(max_tokens * router_.hidden_size() * 4) : 0;
    const int64_t shared = shared_.scratch_bytes(max_tokens);
    int64_t routed = experts_.scratch_bytes(max_tokens, router_.top_k());
    if (shared_follows_)
      routed =
          std::max(routed, experts_.scratch_bytes(std::min(max_tokens, kManyRows - 1), router_.top_k() + 1));
    const int64_t routes = router_.scratch_bytes(max_tokens) +
                           (placement_ ? Arena::padded(max_tokens * router_.top_k() * 4) : 0);
    if (!exchanges_rows(plan_)) return routes + out + shared + routed;
    const int64_t lanes = experts_.returned_sums_bytes() + lane_batch_bytes(plan_, max_tokens);
    return routes + out + std::max(routed + lanes, shared);
  }
  int64_t weight_bytes() const override {
    return router_.weight_bytes() + experts_.weight_bytes() + shared_.weight_bytes();
  }

  bool norms_with_router(int64_t num_rows) const override {
    return ops_.route_fuses_norm(router_.sizes(num_rows));
  }

  bool leaves_rows(int64_t num_rows) const override {
    return !shared_.exists() && num_rows > 0 && experts_.leaves_rows(local_slots(num_rows));
  }

  // The shared expert's gate needs the unrounded rows.
  bool routes_shares() const override { return !shared_.exists() || shared_.gate() == nullptr; }

  Status forward_moe(const MoeForwardArgs& args, Transport&, Arena& scratch,
                     ThreadPool& pool) const override {
    if (args.exchange != nullptr) {
      run_exchanged(args, scratch, pool);
      return {};
    }
    const Routes routes = router_.route(ops_, args, nullptr, scratch);
    DeviceSlots slots = local_slots(args.x.rows);
    slots.ids = physical_ids(routes.ids, args.x.rows, scratch);
    slots.uncombined = args.uncombined;
    slots.shared = shared_slot(args);
    slots.next = args.next;
    slots.send = shared_.exists() ? nullptr : args.send;  // a shared expert is added to the experts' sums
    float* const sum = args.uncombined != nullptr ? nullptr
                       : args.partial != nullptr  ? args.partial
                                                  : args.residual;
    if (slots.shared.exists && experts_.runs_shared(slots)) {
      experts_.run_device_experts(args.x, slots, routes.weights, sum, /*accumulate=*/args.partial == nullptr,
                                  scratch);
      return {};
    }
    slots.shared = {};
    if (shared_.exists() && args.x.rows >= kManyRows) {
      slots.added = shared_.forward_ungated(args.x, args.router_x, scratch, pool);
      experts_.run_device_experts(args.x, slots, routes.weights, sum, /*accumulate=*/args.partial == nullptr,
                                  scratch);
      return {};
    }
    Stream& main = current_stream();
    SideStream* const side = shared_.exists() && args.x.rows > 0 ? main.side() : nullptr;
    const SharedOutput shared = side == nullptr ? run_shared(args, {0, args.x.rows}, scratch, pool)
                                                : run_shared_beside(args, side->fork(main), scratch, pool);
    experts_.run_device_experts(args.x, slots, routes.weights, sum, /*accumulate=*/args.partial == nullptr,
                                scratch);
    if (side != nullptr) side->join(main);
    add_shared(shared, sum, pool);
    return {};
  }

 private:
  // run_on_lanes() takes the number of tokens from the round.
  DeviceSlots local_slots(int64_t num_tokens = 0) const {
    return {.num_tokens = num_tokens,
            .topk = router_.top_k(),
            .first_expert = plan_.problem().local_experts().first,
            .num_routed_experts = plan_.problem().num_physical()};
  }

  // The physical experts of these rows of the rank; `ids` themselves without a placement.
  const int32_t* physical_ids(const int32_t* ids, int64_t num_rows, Arena& scratch) const {
    if (!placement_ || num_rows == 0) return ids;
    int32_t* const physical = scratch.take<int32_t>(num_rows * router_.top_k());
    cuda_a2a_ops()->choose_replicas(placement_->table(), ids, num_rows, router_.top_k(), physical);
    return physical;
  }

  // The shared expert as a slot of the routed experts' launch; exists is false if it cannot be one.
  SharedSlot shared_slot(const MoeForwardArgs& args) const {
    if (!shared_.exists() || (!shared_follows_ && plan_.problem().layout.tp > 1)) return {};
    const DenseMlp::RowMajor weights = shared_.row_major();
    return {.exists = shared_follows_ || weights.gate_up != nullptr,
            .gate = shared_.gate(),
            .x = args.router_x,
            .gate_up = weights.gate_up,
            .down = weights.down,
            .intermediate_size = weights.intermediate_size};
  }

  // Each rank of a group dispatches its share of the group's rows. Without args.partial, only this share of
  // the residual is complete afterwards.
  void run_exchanged(const MoeForwardArgs& args, Arena& scratch, ThreadPool& pool) const {
    const RankLayout& layout = plan_.problem().layout;
    const int ranks = layout.attention_tp();
    const int64_t h = args.x.cols, k = router_.top_k();
    const Shard own = shard_blocks(args.x.rows, 1, ranks, layout.attention_rank());
    FP4MOE_CHECK(ranks == 1 || args.partial != nullptr || plan_.a2a_settings().deterministic,
                 "a group of several ranks needs args.partial unless it is deterministic");
    if (args.partial != nullptr) cuda_a2a_ops()->clear(args.partial, args.x.rows * h);
    float* const sum = (args.partial != nullptr ? args.partial : args.residual) + own.first * h;
    const DeviceExchange& exchange = *args.exchange;
    ExchangeTokens tokens{.layer = args.layer,
                          .num_lane_tokens = shard_blocks(args.largest_group_rows, 1, ranks, 0).count,
                          .num_own = own.count,
                          .first = own.first,
                          .num_filled = args.num_counted,
                          .x = static_cast<const bf16*>(args.x.data) + own.first * h,
                          .nvfp4_scale = experts_.nvfp4_scale()};
    const std::optional<RoutedRound> sent = round_of_router(args, tokens);
    const Routes routes = router_.route(ops_, args, sent ? &*sent : nullptr, scratch);
    tokens.ids = physical_ids(routes.ids + own.first * k, own.count, scratch);
    tokens.weights = routes.weights + own.first * k;
    const int64_t rounds = exchange.num_rounds(tokens);
    SharedOutput shared;
    for (int64_t i = 0; i < rounds; ++i) {
      const A2aRound round = exchange.round_of(tokens, i);
      const bool is_direct = runs_direct(exchange, round);
      if (!sent) is_direct ? exchange.send_direct(round, tokens) : exchange.send(round, tokens);
      if (i == 0) shared = run_shared(args, own, scratch, pool);  // while the rows are in flight
      if (is_direct) {
        experts_.run_direct(round, local_slots(), scratch);
        exchange.add_direct(round, sum);
      } else {
        experts_.run_on_lanes(exchange, round, local_slots(), sum, scratch);
      }
    }
    add_shared(shared, sum, pool);
  }

  // If ranks share a GPU, the blocks of one rank's experts, which wait for other ranks, could keep theirs
  // from starting.
  bool runs_direct(const DeviceExchange& exchange, const A2aRound& round) const {
    return ranks_per_gpu() == 1 && experts_.runs_direct(round, exchange.direct_lanes(round), local_slots());
  }
  // The round, if the router's launch can send it: it norms the rows too, it has all rows of the only round,
  // and the experts that it chooses are those that run. The other ranks need not know, because send_direct()
  // or send() sends the same.
  std::optional<RoutedRound> round_of_router(const MoeForwardArgs& args, const ExchangeTokens& tokens) const {
    if (args.norm == nullptr || !norms_with_router(args.x.rows) || placement_ || tokens.num_own == 0 ||
        tokens.num_own != args.x.rows)
      return {};
    const DeviceExchange& exchange = *args.exchange;
    RoutedRound sent{exchange.round_of(tokens, 0)};
    sent.is_direct = runs_direct(exchange, sent.round);
    if (exchange.num_rounds(tokens) != 1 || (!sent.is_direct && !exchange.sends_to_all()) ||
        !ops_.route_sends(router_.sizes(args.x.rows, &sent)))
      return {};
    return sent;
  }

  // The shared expert's output for some rows, in scratch memory.
  struct SharedOutput {
    float* rows = nullptr;
    int64_t count = 0;  // of floats
  };

  // Runs the shared expert on these rows of x. The output is empty if there is no shared expert.
  SharedOutput run_shared(const MoeForwardArgs& args, Shard rows, Arena& scratch, ThreadPool& pool) const {
    if (!shared_.exists() || rows.count == 0) return {};
    const int64_t h = args.x.cols;
    const ActRows x = {static_cast<bf16*>(args.x.data) + rows.first * h, args.x.dtype, rows.count, h};
    const SharedOutput out = {scratch.take<float>(rows.count * h), rows.count * h};
    shared_.forward_shared_expert(x, args.router_x + rows.first * h, out.rows, scratch, pool);
    return out;
  }

  // Runs the shared expert on all rows, on `side`. Its scratch memory stays taken, because kernels that are
  // enqueued later on the main stream run at the same time.
  SharedOutput run_shared_beside(const MoeForwardArgs& args, Stream& side, Arena& scratch,
                                 ThreadPool& pool) const {
    const StreamScope scope(side);
    const SharedOutput out = run_shared(args, {0, args.x.rows}, scratch, pool);
    scratch.take<uint8_t>(shared_.scratch_bytes(args.x.rows));
    return out;
  }

  // Adds the shared expert's output last on every path, so that one rank and ranks that exchange rows give
  // the same bits if they run the same tactic.
  void add_shared(const SharedOutput& shared, float* sum, ThreadPool& pool) const {
    if (shared.count > 0) dense_.add({shared.rows, sum, shared.count}, pool);
  }

  const MoePlan plan_;
  const DenseOps& dense_;
  const DeviceMoeOps& ops_;
  DeviceRouter router_;
  DeviceExpertRunner experts_;
  SharedExpert shared_;
  bool shared_follows_;
  std::optional<DevicePlacement> placement_;
};

class DeviceMlp final : public DenseMlp {
 public:
  explicit DeviceMlp(DeviceExpertRunner expert) : expert_(std::move(expert)) {}
  int64_t scratch_bytes(int64_t max_tokens) const override { return expert_.scratch_bytes(max_tokens, 1); }
  int64_t weight_bytes() const override { return expert_.weight_bytes(); }
  void forward_mlp(const ActRows& x, float* out, Arena& scratch, ThreadPool&) const override {
    expert_.run_device_experts(x, {nullptr, x.rows}, nullptr, out, /*accumulate=*/false, scratch);
  }
  bool forward_mlp_rounded(const ActRows& x, bf16* out, Arena& scratch, ThreadPool&) const override {
    return expert_.run_rounded(x, out, scratch);
  }

 private:
  DeviceExpertRunner expert_;
};

// One FP4 matrix, run by the ops' linear layer for few tokens if that fits, or by the down GEMM on the tokens
// in order.
class DeviceLinear final : public Fp4Linear {
 public:
  // is_invariant: a token's bits must not depend on the number of tokens, so only the down GEMM runs.
  DeviceLinear(const DenseOps& dense, const DeviceMoeOps& ops, DeviceExperts weights, bool is_invariant)
      : dense_(dense),
        ops_(ops),
        weights_(std::move(weights)),
        has_few_(ops.linear != nullptr && weights_.numerics().scheme == Scheme::kW4A16 && !is_invariant) {}
  int64_t scratch_bytes(int64_t max_tokens) const override {
    return linear_pass_bytes(weights_, max_tokens) +
           Arena::padded(max_tokens * weights_.tiles().hidden_size * 4);
  }
  int64_t weight_bytes() const override { return weights_.num_bytes(); }
  void forward_fp4_linear(const ActRows& x, float* out, int64_t out_stride, bool accumulate, Arena& scratch,
                          ThreadPool& pool) const override {
    const int64_t n = weights_.tiles().hidden_size;
    FP4MOE_CHECK(out_stride == n, "the output rows of a GPU linear layer must be contiguous");
    float* y = accumulate ? scratch.take<float>(x.rows * n) : out;
    if (!run_few({weights_.tiles(), static_cast<const bf16*>(x.data), nullptr, x.rows, y}))
      linear_pass(ops_, weights_, x, y, scratch);
    if (accumulate) dense_.add({y, out, x.rows * n}, pool);
  }
  bool forward_normed_fp4(const RmsNormArgs& norm, float* out) const override {
    return norm.out_f32 == nullptr && run_few({weights_.tiles(), nullptr, &norm, norm.out_act.rows, out});
  }

 private:
  bool run_few(const TiledLinearArgs& args) const {
    if (!has_few_ || !ops_.linear_fits(args)) return false;
    ops_.linear(args);
    return true;
  }

  const DenseOps& dense_;
  const DeviceMoeOps& ops_;
  DeviceExperts weights_;
  const bool has_few_;
};

// Timed tactics are for the routed experts' sizes and do not apply to an MLP; the single tactic of
// deterministic inference applies to every layer.
DeviceTactics tactics_of_mlp(const MoePlan& plan) {
  return plan.a2a_settings().deterministic ? plan.device_tactics() : DeviceTactics();
}

// Whether the shared expert can be one more expert of the layer: it has weights like the others', and the
// ranks have the same part of it.
bool can_follow(const MoePlan& plan, const MlpWeightsView& mlp) {
  const MoeProblem& p = plan.problem();
  const auto matches = [&](const LinearWeightsView& w, int64_t rows, int64_t cols) {
    return w.is_fp4 && w.bias == nullptr && w.fp4.format == p.format && w.fp4.rows == rows &&
           w.fp4.cols == cols;
  };
  const bool has_same_part = p.layout.tp == 1 || (p.layout.ep == 1 && plan.shared_expert_is_sharded());
  return has_same_part && plan.scheme() != Scheme::kW4A4 && p.activation.kind == ActivationKind::kSilu &&
         matches(mlp.gate, p.intermediate_size, p.hidden_size) &&
         matches(mlp.up, p.intermediate_size, p.hidden_size) &&
         matches(mlp.down, p.hidden_size, p.intermediate_size);
}

// Packs the shared expert behind the routed experts.
Result<LayerExperts> make_with_shared(const MoePlan& plan, const DenseOps& ops, MoeWeightsView weights,
                                      const SharedExpertWeights& shared, ThreadPool& pool) {
  MoeProblem p = plan.problem();
  ++p.num_experts;
  weights.experts.push_back(mlp_as_expert(shared.mlp, {0, p.intermediate_size}).experts.front());
  FP4MOE_ASSIGN_OR_RETURN(DeviceExperts experts, DeviceExperts::make(p, plan.numerics(), weights, pool));
  FP4MOE_ASSIGN_OR_RETURN(
      DeviceExpertRunner last,
      DeviceExpertRunner::make(plan.device_ops(), experts.take_last(), tactics_of_mlp(plan)));
  LayerExperts out;
  FP4MOE_ASSIGN_OR_RETURN(out.shared, SharedExpert::of(std::make_unique<DeviceMlp>(std::move(last)), ops,
                                                       shared.gate, p.hidden_size));
  FP4MOE_ASSIGN_OR_RETURN(
      out.routed, DeviceExpertRunner::make(plan.device_ops(), std::move(experts), plan.device_tactics()));
  out.shared_follows = true;
  return out;
}

Result<LayerExperts> make_experts(const MoePlan& plan, const DenseOps& ops, const MoeWeightsView& weights,
                                  const SharedExpertWeights* shared, ThreadPool& pool) {
  if (shared != nullptr && can_follow(plan, shared->mlp))
    return make_with_shared(plan, ops, weights, *shared, pool);
  LayerExperts out;
  FP4MOE_ASSIGN_OR_RETURN(DeviceExperts experts,
                          DeviceExperts::make(plan.problem(), plan.numerics(), weights, pool));
  FP4MOE_ASSIGN_OR_RETURN(
      out.routed, DeviceExpertRunner::make(plan.device_ops(), std::move(experts), plan.device_tactics()));
  if (shared != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(out.shared, SharedExpert::make(plan, ops, *shared, pool));
  }
  return out;
}

}  // namespace

Result<std::unique_ptr<MoeLayer>> make_device_layer(const MoePlan& plan, const DenseOps& ops,
                                                    const RouterWeights& router,
                                                    const MoeWeightsView& weights,
                                                    const SharedExpertWeights* shared, ThreadPool& pool) {
  const MoeProblem& p = plan.problem();
  FP4MOE_ASSIGN_OR_RETURN(DeviceRouter gate,
                          DeviceRouter::make(router, {p.num_experts, p.hidden_size, p.top_k},
                                             plan.a2a_settings().deterministic, ops));
  FP4MOE_ASSIGN_OR_RETURN(LayerExperts experts, make_experts(plan, ops, weights, shared, pool));
  std::optional<DevicePlacement> placement;
  if (plan.places_experts()) {
    FP4MOE_ASSIGN_OR_RETURN(placement, DevicePlacement::make(p.placement_shape(), p.layout.ep_rank()));
  }
  return std::unique_ptr<MoeLayer>(
      std::make_unique<DeviceLayer>(plan, ops, std::move(gate), std::move(experts), std::move(placement)));
}

Result<std::unique_ptr<DenseMlp>> make_device_mlp(const MoePlan& plan, const MoeProblem& problem,
                                                  const MoeWeightsView& weights, ThreadPool& pool) {
  FP4MOE_ASSIGN_OR_RETURN(DeviceExperts expert, DeviceExperts::make(problem, plan.numerics(), weights, pool));
  FP4MOE_ASSIGN_OR_RETURN(
      DeviceExpertRunner runner,
      DeviceExpertRunner::make(plan.device_ops(), std::move(expert), tactics_of_mlp(plan)));
  return std::unique_ptr<DenseMlp>(std::make_unique<DeviceMlp>(std::move(runner)));
}

Result<std::unique_ptr<Fp4Linear>> make_device_linear(const MoePlan& plan, const LinearWeightsView& weights,
                                                      ThreadPool& pool) {
  FP4MOE_ASSIGN_OR_RETURN(DeviceExperts matrix, DeviceExperts::make_linear(weights, plan.numerics(), pool));
  return std::unique_ptr<Fp4Linear>(std::make_unique<DeviceLinear>(
      *cuda_dense_ops(), plan.device_ops(), std::move(matrix), plan.a2a_settings().deterministic));
}

}  // namespace fp4moe
