// Direct rounds: the experts' kernel itself waits for the rows of all ranks and returns its sums. Compared
// with an oracle of the whole layer; the same tokens must always give the same bits.
#include <cstdlib>

// Before gpu_ranks.h, whose number of ranks would leave each too few CTAs. With a GPU per rank, the script
// sets 1.
static const bool two_ranks_share_a_gpu = setenv("FP4MOE_RANKS_PER_GPU", "2", 0) == 0;

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/gpu_ranks.h"
#include "device/device.h"
#include "kernels/device_moe.h"
#include "kernels/device_router.h"
#include "moe/device/device_expert_runner.h"
#include "moe/device/round_tokens.h"
#include "moe/layer_case.h"
#include "moe/moe_oracle.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kExperts = 12, kTopk = 3, kMostTokens = kDirectLanes / kRanks;

struct Tokens {
  int64_t most = 0;  // of a rank
  std::vector<RoundTokens> ranks{kRanks};
};

// One rank's tokens before the norm, and what normalises and routes them.
struct Unrouted {
  int64_t num_tokens, hidden_size;
  Buffer x, norm_weight, gate, words, normed, normed_f32, logits;

  Unrouted(Random& random, int64_t tokens, int64_t hidden)
      : num_tokens(tokens),
        hidden_size(hidden),
        x(on_device(random.normal(tokens * hidden))),
        norm_weight(on_device(random.normal(hidden))),
        gate(on_device(to_bf16(random.normal(kExperts * hidden)))),
        words(on_device(std::vector<RouterWord>(static_cast<size_t>(kRouterFewTokens * kExperts)))),
        normed(on_device(std::vector<bf16>(static_cast<size_t>(tokens * hidden)))),
        normed_f32(on_device(std::vector<float>(static_cast<size_t>(tokens * hidden)))),
        logits(on_device(std::vector<float>(static_cast<size_t>(tokens * kExperts)))) {}

  // direct: the round that the router sends, or null.
  void route(RoundTokens& to, const A2aRound* direct) {
    const RmsNormArgs norm{.x = x.as<float>(),
                           .weight = norm_weight.as<float>(),
                           .eps = 1e-5f,
                           .out_act = {normed.data(), DType::kBF16, num_tokens, hidden_size},
                           .out_f32 = normed_f32.as<float>()};
    const DeviceRouterArgs args{.x = norm.out_f32,
                                .weight = gate.as<bf16>(),
                                .num_tokens = num_tokens,
                                .hidden_size = hidden_size,
                                .rule = {.num_experts = kExperts, .top_k = kTopk},
                                .logits = logits.as<float>(),
                                .ids = to.on_gpu_ids.as<int32_t>(),
                                .weights = to.on_gpu_weights.as<float>(),
                                .norm = &norm,
                                .words = words.as<RouterWord>(),
                                .round = direct,
                                .round_is_direct = direct != nullptr};
    EXPECT_TRUE(sm90_moe_ops()->route_fuses_norm(args));
    EXPECT_TRUE(direct == nullptr || sm90_moe_ops()->route_sends(args));
    sm90_moe_ops()->route(args);
  }
};

class DirectRounds : public testing::TestWithParam<std::tuple<Fp4Format, const char*, A2aResultFormat>> {
 protected:
  A2aResultFormat result_format() const { return std::get<2>(GetParam()); }
  bool is_w4a8() const { return std::string(std::get<1>(GetParam())) == "w4a8"; }

  void SetUp() override {
    if (resolve_device("cuda", 0)->compute_capability != 90) GTEST_SKIP() << "direct rounds need Hopper";
  }

  void make(const LayerSize& size) {
    exchanges_.clear(), runners_.clear(), scratch_.clear();
    experts_ = std::make_unique<ExpertsCase>(size, std::get<0>(GetParam()), ActivationKind::kSwigluOai);
    MoeProblem problem = experts_->problem;
    problem.device = DeviceKind::kCuda;
    problem.compute_capability = 90;
    const MoePlan whole =
        plan_moe(problem, {.fp4_compute = std::get<1>(GetParam()), .tp = kRanks, .ep = kRanks}).value();
    oracle_ = {&experts_->weights, problem.activation, whole.numerics()};
    const A2aShape shape{.hidden_size = size.hidden,
                         .top_k = kTopk,
                         .num_experts = kExperts,
                         .experts_per_rank = kExperts / kRanks,
                         .result_format = result_format()};
    ASSERT_TRUE(shape.allows_direct(kRanks));
    size_ = {shape, kMostTokens, a2a_area(shape, kRanks, kMostTokens)};
    group_ = std::make_unique<TestGroup>(kRanks,
                                         DeviceRegion{.offset = 0, .exchange_bytes = size_.area.num_bytes});
    ThreadPool pool(2);
    group_->for_each([&](int r, DeviceCommunicator& group) {
      const MoePlan plan = whole.at_rank(r);
      exchanges_.emplace_back(size_, group);
      runners_.push_back(
          DeviceExpertRunner::make(
              plan.device_ops(),
              DeviceExperts::make(plan.problem(), plan.numerics(), experts_->weights, pool).value())
              .value());
      scratch_.push_back(
          Arena::make(runners_.back().scratch_bytes(kDirectLanes, kTopk), device_memory()).value());
    });
  }

  // Draws tokens for all ranks and records their rounds. `ids`: of every slot; with -2, random ones.
  Tokens draw(int64_t most, std::vector<int64_t> own, int32_t ids = -2) {
    Tokens tokens{most};
    for (int r = 0; r < kRanks; ++r) {
      RoundTokens& t = tokens.ranks[static_cast<size_t>(r)];
      t.num_own = own[static_cast<size_t>(r)];
      t.num_filled = t.num_own > 2 ? t.num_own - 1 : t.num_own;
      t.x = to_bf16(experts_->random.normal(std::max<int64_t>(t.num_own, 1) * size_.shape.hidden_size));
      for (int64_t i = 0; i < std::max<int64_t>(t.num_own, 1) * kTopk; ++i)
        t.add_slot(experts_->random,
                   ids != -2 ? ids : static_cast<int32_t>(experts_->random.integer(-1, kExperts)));
    }
    group_->for_each([&](int r, DeviceCommunicator&) { record(tokens, r); });
    return tokens;
  }

  // unrouted: the tokens before the norm; router_sends: its launch sends them. Null: they are routed already.
  void record(Tokens& tokens, int rank, Unrouted* unrouted = nullptr, bool router_sends = false) {
    const auto at = static_cast<size_t>(rank);
    RoundTokens& t = tokens.ranks[at];
    t.upload();
    ExchangeTokens inputs = t.inputs(tokens.most);
    if (unrouted != nullptr) inputs.x = unrouted->normed.as<bf16>();
    const DeviceExchange& exchange = exchanges_[at];
    const DeviceSlots slots{
        .topk = kTopk, .first_expert = rank * size_.shape.experts_per_rank, .num_routed_experts = kExperts};
    t.graph = Graph::capture(group_->ranks[at]->stream, [&]() -> Status {
                const A2aRound round = exchange.round_of(inputs, 0);
                EXPECT_TRUE(runners_[at].runs_direct(round, exchange.direct_lanes(round), slots));
                t.clear();
                if (unrouted != nullptr) unrouted->route(t, router_sends ? &round : nullptr);
                if (!router_sends) exchange.send_direct(round, inputs);
                runners_[at].run_direct(round, slots, scratch_[at]);
                exchange.add_direct(round, t.out.as<float>());
                return {};
              }).value();
  }

  void run(Tokens& tokens, int late_rank = -1) {
    group_->for_each([&](int r, DeviceCommunicator&) {
      if (r == late_rank) std::this_thread::sleep_for(std::chrono::microseconds(500));
      tokens.ranks[static_cast<size_t>(r)].graph.launch(group_->ranks[static_cast<size_t>(r)]->stream);
    });
  }
  std::vector<std::vector<float>> outputs(const Tokens& tokens) {
    group_->expect_ok();
    std::vector<std::vector<float>> out;
    group_->for_each([&](int r, DeviceCommunicator&) {
      out.push_back(from_device<float>(tokens.ranks[static_cast<size_t>(r)].out));
    });
    return out;
  }

  // bf16 results lose up to 2^-9 of each rank's sum; in w4a8, codes of the intermediate can flip.
  double budget() const { return is_w4a8() ? 2e-2 : result_format() == A2aResultFormat::kBf16 ? 5e-3 : 1e-3; }
  void expect_right(const Tokens& tokens, const std::string& what) {
    const std::vector<std::vector<float>> actual = outputs(tokens);
    for (size_t r = 0; r < actual.size(); ++r) {
      const RoundTokens& t = tokens.ranks[r];
      std::vector<int32_t> ids = t.ids;
      std::fill(ids.begin() + t.num_filled * kTopk, ids.end(), -1);
      const std::vector<double> exact = oracle_moe(oracle_, bf16_to_floats(t.x), ids, t.weights);
      const std::vector<float> expected(exact.begin(), exact.end());
      EXPECT_TRUE(within_relative_l2(actual[r], expected, budget())) << what << ", rank " << r;
      const auto end = actual[r].begin() + t.num_filled * size_.shape.hidden_size;
      EXPECT_TRUE(std::all_of(end, actual[r].end(), [](float v) { return v == 0; })) << what << ": padding";
    }
  }

  std::unique_ptr<ExpertsCase> experts_;
  OracleLayer oracle_;
  DeviceExchangeSize size_;
  std::unique_ptr<TestGroup> group_;
  std::vector<DeviceExchange> exchanges_;
  std::vector<DeviceExpertRunner> runners_;
  std::vector<Arena> scratch_;
};

constexpr LayerSize kSmall{256, 192, kExperts, kTopk}, kWide{2112, 64, kExperts, kTopk};

TEST_P(DirectRounds, AgreeWithTheOracle) {
  for (const LayerSize size : {kSmall, kWide}) {
    make(size);
    for (int64_t most : {int64_t{1}, kMostTokens}) {
      if (size.hidden == kWide.hidden && most != kMostTokens) continue;
      Tokens even = draw(most, {most, most}), one_idle = draw(most, {0, most});
      // All slots at one rank, at none, and at one expert.
      Tokens at_last = draw(most, {most, most - 1}, kExperts - 1), nowhere = draw(most, {most, most}, -1);
      const std::string at = std::to_string(size.hidden) + " columns, " + std::to_string(most) + " tokens";
      run(even), expect_right(even, at);
      run(one_idle), expect_right(one_idle, at + ", one rank idle");
      run(nowhere), expect_right(nowhere, at + ", no experts");
      run(at_last), expect_right(at_last, at + ", one expert");
      run(even), expect_right(even, at + ", again");
    }
  }
}

TEST_P(DirectRounds, ManyInARowHaveTheSameBits) {
  make(kSmall);
  std::vector<Tokens> cases;
  std::vector<std::vector<std::vector<float>>> first;
  for (const auto& [most, a, b] :
       {std::tuple{1, 1, 1}, {1, 1, 0}, {2, 1, 2}, {4, 4, 3}, {3, 0, 3}, {4, 4, 4}}) {
    cases.push_back(draw(most, {a, b}));
    run(cases.back());
    first.push_back(outputs(cases.back()));
  }
  std::mt19937_64 random(5);
  for (int round = 0; round < 3000; ++round) {
    run(cases[random() % cases.size()], random() % 32 == 0 ? static_cast<int>(random() % kRanks) : -1);
    if (round % 100 != 99) continue;
    for (size_t i = 0; i < cases.size(); ++i) run(cases[i]);
    for (size_t i = 0; i < cases.size(); ++i) ASSERT_EQ(outputs(cases[i]), first[i]) << "case " << i;
  }
}

// The launch that routes the tokens can send them; what the other rank does makes no difference.
TEST_P(DirectRounds, AreSentByTheRouterWithTheSameBits) {
  for (const LayerSize size : {kSmall, kWide}) {
    make(size);
    for (int64_t most : {int64_t{1}, int64_t{3}, kMostTokens}) {
      Tokens tokens = draw(most, {most, most});
      std::vector<Unrouted> unrouted;
      group_->for_each(
          [&](int, DeviceCommunicator&) { unrouted.emplace_back(experts_->random, most, size.hidden); });
      std::vector<std::vector<float>> sent_after;
      for (unsigned senders = 0; senders < 1u << kRanks; ++senders) {
        group_->for_each([&](int r, DeviceCommunicator&) {
          record(tokens, r, &unrouted[static_cast<size_t>(r)], (senders >> r & 1u) != 0);
        });
        for (int round = 0; round < 3; ++round) run(tokens);
        const std::vector<std::vector<float>> sums = outputs(tokens);
        if (senders == 0) sent_after = sums;
        EXPECT_EQ(sums, sent_after) << size.hidden << " columns, " << most << " tokens, ranks " << senders;
      }
      EXPECT_NE(sent_after[0], std::vector<float>(sent_after[0].size())) << "no expert has run";
    }
  }
}

// A rank that does not take part is named by the rank that waits for it.
TEST_P(DirectRounds, EndAtTheDeadline) {
  make(kSmall);
  group_.reset();
  exchanges_.clear();
  group_ =
      std::make_unique<TestGroup>(kRanks, DeviceRegion{.offset = 0, .exchange_bytes = size_.area.num_bytes},
                                  std::chrono::milliseconds(300));
  for (const auto& rank : group_->ranks) exchanges_.emplace_back(size_, *rank->group);
  Tokens tokens = draw(2, {2, 2});
  {
    const StreamScope scope(group_->ranks[1]->stream);
    tokens.ranks[1].graph.launch(group_->ranks[1]->stream);
  }
  group_->synchronize();
  group_->expect_deadline_naming("rank 0 in dispatch");
}

INSTANTIATE_TEST_SUITE_P(Experts, DirectRounds,
                         testing::Combine(testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                                          testing::Values("w4a16", "w4a8"),
                                          testing::Values(A2aResultFormat::kF32, A2aResultFormat::kBf16)),
                         [](const auto& p) {
                           return std::string(fp4_format_name(std::get<0>(p.param))) + "_" +
                                  std::get<1>(p.param) +
                                  (std::get<2>(p.param) == A2aResultFormat::kF32 ? "_f32" : "_bf16");
                         });

}  // namespace
}  // namespace fp4moe
