#include "bench/comm_bench_layer.h"

#include <algorithm>
#include <random>
#include <vector>

#include "bench/moe_kernels.h"
#include "device/device_memory.h"
#include "kernels/device_moe.h"
#include "kernels/device_router.h"

namespace fp4moe {
namespace {

// A rank's router and experts, random, and the tokens of all ranks: the calls of a graph have different ones,
// so that the experts' weights come from memory and not from the L2.
struct LayerRank {
  Buffer norm_weight, gate, words, x;               // x: [kCommCallsInGraph, R T, H] f32
  Buffer normed, normed_f32, logits, ids, weights;  // of a call's tokens
  Buffer gate_up, down, scales, counters, workspace, sums;
  DeviceMoeArgs args;
  RmsNormArgs norm;
};

class Layer {
 public:
  Layer(const CommBenchRanks& all, const CommBenchOptions& o, int64_t tokens)
      : all_(all), o_(o), tokens_(tokens), lanes_(all.size() * tokens), ranks_(all.ranks.size()) {
    const A2aShape shape{.hidden_size = o.hidden_size,
                         .top_k = o.top_k,
                         .num_experts = o.num_experts,
                         .experts_per_rank = o.num_experts / all.size(),
                         .result_format = A2aResultFormat::kBf16};  // flashinfer's
    const DeviceExchangeSize size{shape, kDirectLanes, a2a_area(shape, all.size(), kDirectLanes)};
    for (const auto& rank : all.ranks) exchanges_.emplace_back(size, *rank->group);
  }

  Status make() {
    FP4MOE_ASSIGN_OR_RETURN(kernels_, moe_kernels_of("w4a16", "few_tokens"));
    return all_.for_each([&](int r, CommBenchRank&) { return make_rank(r); });
  }

  // Whether ranks can run direct rounds.
  bool has_direct() const {
    bool fits = true;
    const Status status = all_.for_each([&](int r, CommBenchRank&) -> Status {
      const A2aRound round = exchanges_[static_cast<size_t>(r)].round_of(tokens_of(r), 0);
      DeviceMoeArgs args = ranks_[static_cast<size_t>(r)].args;
      args.direct = &round;
      fits = fits && sm90_moe_ops()->direct_fits(args);
      return {};
    });
    return status.ok() && fits;
  }

  void run(CommLayer kind, int r, CommBenchRank& rank, int64_t call) {
    const auto at = static_cast<size_t>(r);
    LayerRank& own = ranks_[at];
    DeviceMoeArgs args = own.args;
    if (kind == CommLayer::kLocal) {
      route(own, call * lanes_, lanes_, nullptr);
      args.x = own.normed.as<bf16>(), args.ids = own.ids.as<int32_t>(),
      args.weights = own.weights.as<float>();
      return kernels_.tactic.layer(args);
    }
    const DeviceExchange& exchange = exchanges_[at];
    const ExchangeTokens tokens = tokens_of(r);
    const A2aRound round = exchange.round_of(tokens, 0);
    const int64_t first = call * lanes_ + r * tokens_;
    if (kind == CommLayer::kDirect) {
      args.direct = &round;
      if (!route(own, first, tokens_, &round)) exchange.send_direct(round, tokens);
      sm90_moe_ops()->direct(args);
      exchange.add_direct(round, rank.out.as<float>());
      return;
    }
    route(own, first, tokens_, nullptr);
    exchange.send(round, tokens);
    Arena none;
    const LaneBatch batch = exchange.wait(round, false, none);
    args.x = static_cast<const bf16*>(batch.x.data), args.ids = batch.ids, args.weights = batch.weights;
    kernels_.tactic.layer(args);
    exchange.combine(round, {.sums = args.out}, rank.out.as<float>());
  }

 private:
  // Normalises and routes tokens of a call. Returns whether that launch sent them in the direct round.
  bool route(const LayerRank& own, int64_t first, int64_t count, const A2aRound* direct) const {
    RmsNormArgs norm = own.norm;
    norm.x += first * o_.hidden_size;
    norm.out_act.rows = count;
    DeviceRouterArgs router{.x = norm.out_f32,
                            .weight = own.gate.as<bf16>(),
                            .num_tokens = count,
                            .hidden_size = o_.hidden_size,
                            .rule = {.num_experts = o_.num_experts, .top_k = o_.top_k},
                            .logits = own.logits.as<float>(),
                            .ids = own.ids.as<int32_t>(),
                            .weights = own.weights.as<float>(),
                            .norm = &norm,
                            .words = own.words.as<RouterWord>()};
    router.round = direct, router.round_is_direct = true;
    const bool sends = direct != nullptr && sm90_moe_ops()->route_sends(router);
    if (!sends) router.round = nullptr;
    sm90_moe_ops()->route(router);
    return sends;
  }

  Status make_rank(int r) {
    LayerRank& own = ranks_[static_cast<size_t>(r)];
    FP4MOE_RETURN_IF_ERROR(make_router(own));
    const int64_t h = o_.hidden_size, i = o_.intermediate_size, count = o_.num_experts / all_.size();
    constexpr Fp4Format kFormat = Fp4Format::kMxfp4;
    FP4MOE_ASSIGN_OR_RETURN(own.gate_up,
                            Buffer::make(count * kernels_.matrix_bytes(kFormat, 2 * i, h), device_memory()));
    FP4MOE_ASSIGN_OR_RETURN(own.down,
                            Buffer::make(count * kernels_.matrix_bytes(kFormat, h, i), device_memory()));
    FP4MOE_ASSIGN_OR_RETURN(own.sums, Buffer::make(lanes_ * h * 4, device_memory()));
    const auto seed = static_cast<uint64_t>(2 * r);
    kernels_.fill(kFormat, own.gate_up.data(), 2 * i, h, count, seed);
    kernels_.fill(kFormat, own.down.data(), h, i, count, seed + 1);
    FP4MOE_ASSIGN_OR_RETURN(own.scales,
                            upload_to_gpu(std::vector<float>(static_cast<size_t>(count * 3), 1.0f)));
    FP4MOE_ASSIGN_OR_RETURN(own.counters, upload_to_gpu(std::vector<uint8_t>(kMoeCounterBytes)));
    own.args = {.experts = {.format = kFormat,
                            .num_experts = count,
                            .hidden_size = h,
                            .intermediate_size = i,
                            .activation = {.kind = ActivationKind::kSilu},
                            .gate_up = own.gate_up.data(),
                            .down = own.down.data(),
                            .scales = own.scales.as<float>()},
                .num_tokens = lanes_,
                .topk = o_.top_k,
                .first_expert = r * count,
                .num_routed_experts = o_.num_experts,
                .out = own.sums.as<float>(),
                .counters = own.counters.data()};
    FP4MOE_ASSIGN_OR_RETURN(
        own.workspace,
        Buffer::make(kernels_.tactic.workspace_bytes(own.args.experts, lanes_, o_.top_k), device_memory()));
    own.args.workspace = own.workspace.data();
    if (!kernels_.tactic.fits(own.args))
      return unsupported("layer: few_tokens does not run " + std::to_string(lanes_) +
                         " tokens of these sizes");
    return current_stream().synchronize();
  }

  // The same on all ranks.
  Status make_router(LayerRank& own) const {
    const int64_t h = o_.hidden_size, experts = o_.num_experts;
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    std::vector<bf16> gate(static_cast<size_t>(experts * h));
    for (bf16& v : gate) v = float_to_bf16(normal(random));
    std::vector<float> x(static_cast<size_t>(kCommCallsInGraph * lanes_ * h));
    for (float& v : x) v = normal(random);
    FP4MOE_ASSIGN_OR_RETURN(own.gate, upload_to_gpu(gate));
    FP4MOE_ASSIGN_OR_RETURN(own.x, upload_to_gpu(x));
    FP4MOE_ASSIGN_OR_RETURN(own.norm_weight, upload_to_gpu(std::vector<float>(static_cast<size_t>(h), 1.0f)));
    FP4MOE_ASSIGN_OR_RETURN(
        own.words, upload_to_gpu(std::vector<RouterWord>(static_cast<size_t>(kRouterFewTokens * experts))));
    FP4MOE_ASSIGN_OR_RETURN(own.normed, Buffer::make(lanes_ * h * 2, device_memory()));
    FP4MOE_ASSIGN_OR_RETURN(own.normed_f32, Buffer::make(lanes_ * h * 4, device_memory()));
    FP4MOE_ASSIGN_OR_RETURN(own.logits, Buffer::make(lanes_ * experts * 4, device_memory()));
    FP4MOE_ASSIGN_OR_RETURN(own.ids, Buffer::make(lanes_ * o_.top_k * 4, device_memory()));
    FP4MOE_ASSIGN_OR_RETURN(own.weights, Buffer::make(lanes_ * o_.top_k * 4, device_memory()));
    own.norm = {.x = own.x.as<float>(),
                .weight = own.norm_weight.as<float>(),
                .eps = 1e-5f,
                .out_act = {own.normed.data(), DType::kBF16, lanes_, h},
                .out_f32 = own.normed_f32.as<float>()};
    return {};
  }

  ExchangeTokens tokens_of(int r) const {
    const LayerRank& own = ranks_[static_cast<size_t>(r)];
    return {.num_lane_tokens = tokens_,
            .num_own = tokens_,
            .x = own.normed.as<bf16>(),
            .ids = own.ids.as<int32_t>(),
            .weights = own.weights.as<float>()};
  }

  const CommBenchRanks& all_;
  const CommBenchOptions& o_;
  const int64_t tokens_, lanes_;
  MoeKernels kernels_{};
  std::vector<LayerRank> ranks_;
  std::vector<DeviceExchange> exchanges_;
};

}  // namespace

Result<CommBenchRow> bench_comm_layer(const CommBenchRanks& all, const CommBenchOptions& o, CommLayer kind,
                                      int64_t tokens) {
  Layer layer(all, o, tokens);
  FP4MOE_RETURN_IF_ERROR(layer.make());
  if (kind == CommLayer::kDirect && !layer.has_direct())
    return unsupported("layer: no direct rounds for these sizes with " + std::to_string(all.size()) +
                       " ranks");
  const char* const names[] = {"layer, local", "layer, exchanged", "layer, direct round"};
  CommBenchRow row{.op = names[static_cast<size_t>(kind)], .tokens = tokens};
  std::vector<int64_t> calls(all.ranks.size());
  FP4MOE_ASSIGN_OR_RETURN(const CommTimes times,
                          time_comm_calls(all, o.repeats, [&](int r, CommBenchRank& rank) {
                            layer.run(kind, r, rank, calls[static_cast<size_t>(r)]++ % kCommCallsInGraph);
                            return Status();
                          }));
  row.p50 = times.p50, row.p99 = times.p99;
  return row;
}

}  // namespace fp4moe
