// Many exchange rounds in a random order, with random numbers of tokens, idle ranks and stalls, from recorded
// graphs. The experts return each row as it arrived, so that a round adds a known multiple of a token's row
// to its output; all values are exact in every format. Runs for FP4MOE_SOAK_SECONDS (default 2) per protocol
// and number of ranks, with the seed FP4MOE_SOAK_SEED (default 1).
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/gpu_ranks.h"
#include "device/graph.h"
#include "moe/device/device_exchange.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int64_t kHidden = 512, kTopk = 8, kExperts = 32, kMostTokens = 96;
constexpr int kCases = 48, kRoundsAtOnce = 100, kRoundsBetweenChecks = 4000;

int64_t setting(const char* name, int64_t standard) {
  const char* const text = std::getenv(name);
  return text == nullptr ? standard : std::strtoll(text, nullptr, 10);
}

// One rank's part of a round.
struct RankPart {
  int64_t num_own = 0;
  Buffer x, ids, weights, row_of_slot, y, out;
  std::vector<float> added;  // [num_own, H] what one round adds to `out`
  Graph graph;
};
struct Case {
  int64_t num_tokens = 0;
  std::vector<RankPart> ranks;
  int64_t num_rounds = 0;  // since the outputs were zeros
};

class ExchangeSoak : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int num_ranks() const { return std::get<0>(GetParam()); }

  void SetUp() override {
    const A2aShape shape{.hidden_size = kHidden,
                         .top_k = kTopk,
                         .num_experts = kExperts,
                         .experts_per_rank = kExperts / num_ranks(),
                         .slots_return = std::get<1>(GetParam())};
    size_ = {shape, kMostTokens, a2a_area(shape, num_ranks(), kMostTokens)};
    group_ = std::make_unique<TestGroup>(num_ranks(),
                                         DeviceRegion{.offset = 0, .exchange_bytes = size_.area.num_bytes});
    for (const auto& rank : group_->ranks) exchanges_.emplace_back(size_, *rank->group);
    random_.seed(static_cast<uint64_t>(setting("FP4MOE_SOAK_SEED", 1)));
    for (int i = 0; i < kCases; ++i) make_case();
  }

  // Draws a round: mostly few tokens, one rank in four idle, ids that are no experts, or all tokens on one
  // rank.
  void make_case() {
    Case& c = cases_.emplace_back();
    c.num_tokens = random_() % 3 == 0 ? draw(1, kMostTokens) : draw(1, 8);
    c.ranks.resize(static_cast<size_t>(num_ranks()));
    const bool skewed = random_() % 4 == 0;
    std::vector<int32_t> lanes(static_cast<size_t>(num_ranks() * c.num_tokens * kTopk), -1);
    std::vector<std::vector<int32_t>> ids(c.ranks.size());
    for (size_t r = 0; r < c.ranks.size(); ++r) {
      RankPart& part = c.ranks[r];
      part.num_own = r > 0 && random_() % 4 == 0 ? 0 : r == 0 ? c.num_tokens : draw(0, c.num_tokens);
      for (int64_t i = 0; i < part.num_own * kTopk; ++i) {
        const int64_t id = skewed ? draw(0, kExperts / num_ranks() - 1) : draw(-1, kExperts - 1);
        ids[r].push_back(static_cast<int32_t>(id));
        lanes[r * static_cast<size_t>(c.num_tokens * kTopk) + static_cast<size_t>(i)] = ids[r].back();
      }
    }
    group_->for_each([&](int r, DeviceCommunicator&) {
      const auto at = static_cast<size_t>(r);
      fill(c.ranks[at], ids[at]);
      std::vector<int32_t> rows(lanes.size());
      for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = lanes[i] >= 0 && lanes[i] / size_.shape.experts_per_rank == r
                      ? static_cast<int32_t>(i / kTopk)
                      : -1;
      c.ranks[at].row_of_slot = on_device(rows);
      c.ranks[at].y = on_device(std::vector<bf16>(rows.size() / kTopk * kHidden));
      c.ranks[at].graph = record(c, r);
    });
  }
  int64_t draw(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random_() % static_cast<uint64_t>(most - least + 1));
  }

  // Draws a rank's rows of small integers and its weights of 1/2 or 1, and computes what a round adds.
  void fill(RankPart& part, const std::vector<int32_t>& ids) {
    const auto tokens = static_cast<size_t>(part.num_own);
    std::vector<bf16> x(std::max<size_t>(tokens, 1) * kHidden);
    std::vector<float> weights(std::max<size_t>(ids.size(), 1));
    for (bf16& v : x) v = float_to_bf16(static_cast<float>(draw(-4, 4)));
    for (float& w : weights) w = random_() % 2 == 0 ? 0.5f : 1.0f;
    part.added.resize(tokens * kHidden);
    for (size_t t = 0; t < tokens; ++t) {
      float sum = 0;
      for (size_t k = 0; k < kTopk; ++k)
        if (ids[t * kTopk + k] >= 0) sum += weights[t * kTopk + k];
      for (size_t h = 0; h < kHidden; ++h)
        part.added[t * kHidden + h] = sum * bf16_to_float(x[t * kHidden + h]);
    }
    part.x = on_device(x);
    part.weights = on_device(weights);
    part.ids = on_device(ids.empty() ? std::vector<int32_t>{-1} : ids);
    part.out = on_device(std::vector<float>(x.size(), 0));
  }

  Graph record(Case& c, int rank) {
    const auto at = static_cast<size_t>(rank);
    RankPart& part = c.ranks[at];
    const DeviceExchange& exchange = exchanges_[at];
    return Graph::capture(
               group_->ranks[at]->stream,
               [&]() -> Status {
                 const ExchangeTokens tokens{.num_lane_tokens = c.num_tokens,
                                             .num_own = part.num_own,
                                             .x = part.x.as<bf16>(),
                                             .ids = part.ids.as<int32_t>(),
                                             .weights = part.weights.as<float>()};
                 const A2aRound round = exchange.round_of(tokens, 0);
                 exchange.send(round, tokens);
                 Arena none;
                 const LaneBatch batch = exchange.wait(round, false, none);
                 cudaMemcpyAsync(part.y.data(), batch.x.data, static_cast<size_t>(part.y.num_bytes()),
                                 cudaMemcpyDeviceToDevice, current_stream().handle());
                 exchange.combine(
                     round, {.y_bf16 = part.y.as<bf16>(), .row_of_slot = part.row_of_slot.as<int32_t>()},
                     part.out.as<float>());
                 return {};
               })
        .value();
  }

  void run_round() {
    Case& c = cases_[random_() % cases_.size()];
    const size_t late = random_() % 64 == 0 ? random_() % c.ranks.size() : c.ranks.size();
    group_->for_each([&](int r, DeviceCommunicator&) {
      const auto at = static_cast<size_t>(r);
      if (at == late) std::this_thread::sleep_for(std::chrono::microseconds(draw(1, 2000)));
      c.ranks[at].graph.launch(group_->ranks[at]->stream);
    });
    ++c.num_rounds;
  }

  // Compares every output with what its rounds have added, and sets it to zeros.
  void check() {
    group_->expect_ok();
    for (size_t i = 0; i < cases_.size(); ++i) {
      Case& c = cases_[i];
      group_->for_each([&](int r, DeviceCommunicator&) {
        RankPart& part = c.ranks[static_cast<size_t>(r)];
        std::vector<float> expected(std::max<size_t>(part.added.size(), kHidden));
        const std::vector<float> zeros(expected.size());
        for (size_t k = 0; k < part.added.size(); ++k)
          expected[k] = static_cast<float>(c.num_rounds) * part.added[k] + 0.0f;  // never -0.0
        ASSERT_TRUE(same_bits(from_device<float>(part.out), expected))
            << "case " << i << " of " << c.num_tokens << " tokens after " << c.num_rounds << " rounds, rank "
            << r;
        ASSERT_TRUE(device_memory().upload(part.out.data(), zeros.data(), std::ssize(zeros) * 4).ok());
      });
      c.num_rounds = 0;
    }
    group_->synchronize();
  }

  DeviceExchangeSize size_;
  std::unique_ptr<TestGroup> group_;
  std::vector<DeviceExchange> exchanges_;
  std::vector<Case> cases_;
  std::mt19937_64 random_;
};

TEST_P(ExchangeSoak, EveryRoundIsExact) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(setting("FP4MOE_SOAK_SECONDS", 2));
  int64_t rounds = 0;
  while (std::chrono::steady_clock::now() < end && !HasFailure()) {
    run_round();
    if (++rounds % kRoundsAtOnce == 0) group_->expect_ok();
    if (rounds % kRoundsBetweenChecks == 0) check();
  }
  check();
  std::printf("%lld rounds of %d ranks\n", static_cast<long long>(rounds), num_ranks());
}

INSTANTIATE_TEST_SUITE_P(Protocols, ExchangeSoak, testing::Combine(testing::Values(2, 4), testing::Bool()),
                         [](const testing::TestParamInfo<std::tuple<int, bool>>& which) {
                           return std::string(std::get<1>(which.param) ? "slots_" : "sums_") +
                                  std::to_string(std::get<0>(which.param));
                         });

}  // namespace
}  // namespace fp4moe
