// Layers whose experts' kernel stores each slot's row on the rank of its token (DeviceExpertArgs::returns):
// compared, bit for bit, with one rank that has all experts, and with the rows in their places.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "comm/gpu_ranks.h"
#include "device/device.h"
#include "kernels/device_moe.h"
#include "moe/device/device_expert_runner.h"
#include "moe/device/round_tokens.h"
#include "moe/layer_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int64_t kExperts = 12, kTopk = 3, kMostTokens = 128;
constexpr LayerSize kSize{576, 192, kExperts, kTopk};

struct Tokens {
  int64_t most = 0;  // T
  std::vector<RoundTokens> ranks;
  std::vector<float> expected;  // [R T, H]: of one rank
};

class ReturnedRows : public testing::TestWithParam<std::tuple<int, Fp4Format, const char*>> {
 protected:
  int num_ranks() const { return std::get<0>(GetParam()); }

  void SetUp() override {
    if (resolve_device("cuda", 0)->compute_capability != 90) GTEST_SKIP() << "needs Hopper";
  }

  // other: the tactic of rank 0; the other ranks, and the one rank, run "sorted".
  void make(const char* other = "sorted") {
    experts_ = std::make_unique<ExpertsCase>(kSize, std::get<1>(GetParam()), ActivationKind::kSwigluOai);
    MoeProblem problem = experts_->problem;
    problem.device = DeviceKind::kCuda;
    problem.compute_capability = 90;
    const MoePlan one = plan_moe(problem, {.fp4_compute = std::get<2>(GetParam())}).value();
    const MoePlan whole =
        plan_moe(problem, {.fp4_compute = std::get<2>(GetParam()), .tp = num_ranks(), .ep = num_ranks()})
            .value();
    const A2aShape shape{.hidden_size = kSize.hidden,
                         .top_k = kTopk,
                         .num_experts = kExperts,
                         .experts_per_rank = kExperts / num_ranks(),
                         .slots_return = true};
    ASSERT_TRUE(shape.allows_returned_rows());
    size_ = {shape, kMostTokens, a2a_area(shape, num_ranks(), kMostTokens)};
    group_ = std::make_unique<TestGroup>(num_ranks(),
                                         DeviceRegion{.offset = 0, .exchange_bytes = size_.area.num_bytes});
    group_->for_each([&](int r, DeviceCommunicator& group) {
      exchanges_.emplace_back(size_, group);
      add_runner(whole.at_rank(r), r == 0 ? other : "sorted");
    });
    const StreamScope scope(group_->ranks[0]->stream);
    add_runner(one, "sorted");
  }

  // Draws tokens for all ranks: the last rank has few or is idle, and rank 0 has padding.
  Tokens draw(int64_t most, int64_t of_last) {
    Tokens tokens{.most = most, .ranks = std::vector<RoundTokens>(static_cast<size_t>(num_ranks()))};
    for (int r = 0; r < num_ranks(); ++r) {
      RoundTokens& t = tokens.ranks[static_cast<size_t>(r)];
      t.num_own = r == num_ranks() - 1 ? of_last : most;
      t.num_filled = r == 0 ? most - most / 8 : t.num_own;
      t.x = to_bf16(experts_->random.normal(most * kSize.hidden));
      for (int64_t i = 0; i < most * kTopk; ++i)
        t.add_slot(experts_->random, static_cast<int32_t>(experts_->random.integer(-1, kExperts)));
    }
    group_->for_each([&](int r, DeviceCommunicator&) { record(tokens, r); });
    tokens.expected = of_one_rank(tokens);
    return tokens;
  }

  void run(const Tokens& tokens) {
    group_->for_each([&](int r, DeviceCommunicator&) {
      tokens.ranks[static_cast<size_t>(r)].graph.launch(group_->ranks[static_cast<size_t>(r)]->stream);
    });
  }

  // The rank's tokens that are not padding.
  std::vector<float> filled(const std::vector<float>& rows, const RoundTokens& t) const {
    return {rows.begin(), rows.begin() + t.num_filled * kSize.hidden};
  }
  std::vector<float> expected(const Tokens& tokens, size_t rank) const {
    const auto first = tokens.expected.begin() + static_cast<int64_t>(rank) * tokens.most * kSize.hidden;
    return filled({first, tokens.expected.end()}, tokens.ranks[rank]);
  }
  std::vector<float> output(const RoundTokens& t) const { return filled(from_device<float>(t.out), t); }

  void expect_the_bits_of_one_rank(const Tokens& tokens, const std::string& what) {
    group_->expect_ok();
    group_->for_each([&](int r, DeviceCommunicator&) {
      const RoundTokens& t = tokens.ranks[static_cast<size_t>(r)];
      EXPECT_EQ(output(t), expected(tokens, static_cast<size_t>(r))) << what << ", rank " << r;
      const std::vector<float> all = from_device<float>(t.out);
      EXPECT_TRUE(
          std::all_of(all.begin() + t.num_filled * kSize.hidden, all.end(), [](float v) { return v == 0; }))
          << what << ", rank " << r << ": padding";
    });
  }

  // Whether every slot's row, also that of an expert of the same rank, is in its place: the weighted sums of
  // the places are the output. Only after the last round.
  void expect_rows_in_places(const Tokens& tokens, const std::string& what) {
    group_->for_each([&](int r, DeviceCommunicator& group) {
      const RoundTokens& t = tokens.ranks[static_cast<size_t>(r)];
      std::vector<bf16> rows(static_cast<size_t>(tokens.most * kTopk * kSize.hidden));
      const CommGroup view = group.exchange_group();
      ASSERT_TRUE(device_memory()
                      .download(rows.data(), view.regions[r] + view.layout.exchange + size_.area.returns,
                                std::ssize(rows) * 2)
                      .ok());
      std::vector<float> sums(static_cast<size_t>(t.num_filled * kSize.hidden));
      for (size_t slot = 0; slot < static_cast<size_t>(t.num_filled * kTopk); ++slot) {
        if (t.ids[slot] < 0 || t.ids[slot] >= kExperts) continue;
        for (size_t c = 0; c < static_cast<size_t>(kSize.hidden); ++c) {
          float& sum = sums[slot / kTopk * static_cast<size_t>(kSize.hidden) + c];
          sum = std::fma(t.weights[slot], bf16_to_float(rows[slot * static_cast<size_t>(kSize.hidden) + c]),
                         sum);
        }
      }
      EXPECT_EQ(output(t), sums) << what << ", rank " << r;
    });
  }

  std::unique_ptr<TestGroup> group_;
  std::unique_ptr<ExpertsCase> experts_;

 private:
  void add_runner(const MoePlan& plan, std::string_view tactic) {
    ThreadPool pool(2);
    const DeviceMoeOps& ops = plan.device_ops();
    const auto found = std::find_if(ops.tactics.begin(), ops.tactics.end(),
                                    [&](const DeviceMoeTactic& t) { return t.name == tactic; });
    ASSERT_NE(found, ops.tactics.end());
    runners_.push_back(
        DeviceExpertRunner::make(
            ops, DeviceExperts::make(plan.problem(), plan.numerics(), experts_->weights, pool).value(),
            {.buckets = {num_ranks() * kMostTokens},
             .chosen = {static_cast<uint8_t>(found - ops.tactics.begin())}})
            .value());
    scratch_.push_back(
        Arena::make(runners_.back().scratch_bytes(num_ranks() * kMostTokens, kTopk), device_memory())
            .value());
  }

  void record(Tokens& tokens, int rank) {
    const auto at = static_cast<size_t>(rank);
    RoundTokens& t = tokens.ranks[at];
    t.upload();
    const ExchangeTokens inputs = t.inputs(tokens.most);
    const DeviceExchange& exchange = exchanges_[at];
    const DeviceSlots slots{
        .topk = kTopk, .first_expert = rank * size_.shape.experts_per_rank, .num_routed_experts = kExperts};
    t.graph = Graph::capture(group_->ranks[at]->stream, [&]() -> Status {
                t.clear();
                const A2aRound round = exchange.round_of(inputs, 0);
                exchange.send(round, inputs);
                runners_[at].run_on_lanes(exchange, round, slots, t.out.as<float>(), scratch_[at]);
                return {};
              }).value();
  }

  // Runs all lanes on the rank that has all experts.
  std::vector<float> of_one_rank(const Tokens& tokens) {
    std::vector<bf16> x;
    std::vector<int32_t> ids;
    std::vector<float> weights;
    for (const RoundTokens& t : tokens.ranks) {
      x.insert(x.end(), t.x.begin(), t.x.end());
      weights.insert(weights.end(), t.weights.begin(), t.weights.end());
      ids.insert(ids.end(), t.ids.begin(), t.ids.end());
      std::fill(ids.end() - (tokens.most - t.num_filled) * kTopk, ids.end(), -1);
    }
    const StreamScope scope(group_->ranks[0]->stream);
    const Buffer on_gpu_x = on_device(x), on_gpu_ids = on_device(ids), on_gpu_weights = on_device(weights);
    const Buffer out = on_device(std::vector<float>(x.size()));
    const int64_t lanes = num_ranks() * tokens.most;
    runners_.back().run_device_experts(
        {on_gpu_x.data(), DType::kBF16, lanes, kSize.hidden},
        {.ids = on_gpu_ids.as<int32_t>(), .num_tokens = lanes, .topk = kTopk, .num_routed_experts = kExperts},
        on_gpu_weights.as<float>(), out.as<float>(), /*accumulate=*/false, scratch_.back());
    EXPECT_TRUE(current_stream().synchronize().ok());
    return from_device<float>(out);
  }

  DeviceExchangeSize size_;
  std::vector<DeviceExchange> exchanges_;
  std::vector<DeviceExpertRunner> runners_;  // of the ranks, then of the one rank
  std::vector<Arena> scratch_;               // the same
};

// Few and many rows per expert.
TEST_P(ReturnedRows, GiveTheBitsOfOneRank) {
  make();
  for (const auto& [most, of_last] : {std::tuple{16, 16}, {40, 0}, {kMostTokens, kMostTokens - 9}}) {
    const Tokens tokens = draw(most, of_last);
    run(tokens);
    const std::string what = std::to_string(most) + " tokens";
    expect_the_bits_of_one_rank(tokens, what);
    expect_rows_in_places(tokens, what);
  }
}

// No rank waits for the host between rounds, whose rows use the same places.
TEST_P(ReturnedRows, ReplaceThoseOfTheLastRound) {
  make();
  std::vector<Tokens> cases;
  for (const auto& [most, of_last] : {std::tuple{24, 24}, {64, 3}, {9, 0}, {kMostTokens, kMostTokens}})
    cases.push_back(draw(most, of_last));
  for (int round = 0; round < 200; ++round) {
    run(cases[static_cast<size_t>(experts_->random.integer(0, std::ssize(cases) - 1))]);
    if (round % 50 != 49) continue;
    for (const Tokens& tokens : cases) run(tokens);
    for (const Tokens& tokens : cases)
      expect_the_bits_of_one_rank(tokens, std::to_string(tokens.most) + " tokens");
  }
}

// Ranks need not agree: the experts of rank 0 run in a tactic whose rows combine() returns.
TEST_P(ReturnedRows, MixWithRowsThatCombineReturns) {
  make("wide");
  for (const int64_t most : {int64_t{16}, kMostTokens}) {
    const Tokens tokens = draw(most, most - 1);
    for (int round = 0; round < 3; ++round) run(tokens);
    group_->expect_ok();
    group_->for_each([&](int r, DeviceCommunicator&) {
      const auto at = static_cast<size_t>(r);
      EXPECT_TRUE(within_relative_l2(output(tokens.ranks[at]), expected(tokens, at), 2e-2)) << "rank " << r;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Experts, ReturnedRows,
                         testing::Combine(testing::Values(2, 4),
                                          testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                                          testing::Values("w4a16", "w4a8")),
                         [](const auto& p) {
                           return std::string(fp4_format_name(std::get<1>(p.param))) + "_" +
                                  std::get<2>(p.param) + "_" + std::to_string(std::get<0>(p.param));
                         });

}  // namespace
}  // namespace fp4moe
