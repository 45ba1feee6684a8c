// Rounds that the launch which routes the tokens sends (DeviceRouterArgs::round) and rounds that a launch of
// their own sends, in any mix of ranks: compared with what each rank routed, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "comm/gpu_ranks.h"
#include "device/device.h"
#include "kernels/dense_case.h"
#include "kernels/device_moe.h"
#include "kernels/device_router.h"
#include "moe/device/device_exchange.h"

namespace fp4moe {
namespace {

constexpr int64_t kExperts = 64, kTopk = 5;

// Columns, and tokens per rank. A token has one, two or four blocks of the router and one or two flags.
struct Size {
  int64_t hidden, tokens;
};
constexpr Size kSizes[] = {{256, 17}, {256, 30}, {1024, 130}, {2880, 40}, {2880, 64}};

// One rank's tokens of a round, before the norm and after the router.
struct RankTokens {
  int64_t num_own = 0, num_filled = 0;
  Buffer x, norm_weight, gate, words, filled;
  Buffer normed, normed_f32, logits, ids, weights;
};

class RoutedRounds : public testing::TestWithParam<int> {
 protected:
  int num_ranks() const { return GetParam(); }

  void SetUp() override {
    if (resolve_device("cuda", 0)->compute_capability != 90) GTEST_SKIP() << "needs Hopper";
  }

  void make(const Size& size) {
    const A2aShape shape{.hidden_size = size.hidden,
                         .top_k = kTopk,
                         .num_experts = kExperts,
                         .experts_per_rank = kExperts / num_ranks()};
    size_ = {shape, size.tokens, a2a_area(shape, num_ranks(), size.tokens)};
    exchanges_.clear();
    group_ = std::make_unique<TestGroup>(num_ranks(),
                                         DeviceRegion{.offset = 0, .exchange_bytes = size_.area.num_bytes});
    for (const auto& rank : group_->ranks) exchanges_.emplace_back(size_, *rank->group);
  }

  // With is_uneven, rank 1 is idle and rank 2 has few tokens. Rank 0 has padding in any case.
  void draw(bool is_uneven) {
    tokens_ = std::vector<RankTokens>(static_cast<size_t>(num_ranks()));
    group_->for_each([&](int r, DeviceCommunicator&) {
      RankTokens& t = tokens_[static_cast<size_t>(r)];
      t.num_own = !is_uneven ? most() : r == 1 ? 0 : r == 2 ? most() / 4 : most();
      t.num_filled = r == 0 ? most() - most() / 4 : t.num_own;
      const int64_t n = std::max<int64_t>(t.num_own, 1) * hidden();
      t.x = on_device(random_.normal(n));
      t.norm_weight = on_device(random_.normal(hidden()));
      t.gate = on_device(to_bf16(random_.normal(kExperts * hidden())));
      t.words = on_device(std::vector<RouterWord>(static_cast<size_t>(kRouterFewTokens * kExperts)));
      t.filled = on_device(std::vector<int32_t>{static_cast<int32_t>(t.num_filled)});
      t.normed = on_device(std::vector<bf16>(static_cast<size_t>(n)));
      t.normed_f32 = on_device(std::vector<float>(static_cast<size_t>(n)));
      t.logits = on_device(std::vector<float>(static_cast<size_t>(most() * kExperts)));
      t.ids = on_device(std::vector<int32_t>(static_cast<size_t>(most() * kTopk)));
      t.weights = on_device(std::vector<float>(static_cast<size_t>(most() * kTopk)));
    });
  }

  // senders: as bits, the ranks whose routers send, if they have all tokens.
  void run(unsigned senders) {
    batches_.clear();
    group_->for_each([&](int r, DeviceCommunicator&) {
      RankTokens& t = tokens_[static_cast<size_t>(r)];
      const DeviceExchange& exchange = exchanges_[static_cast<size_t>(r)];
      const ExchangeTokens tokens{.num_lane_tokens = most(),
                                  .num_own = t.num_own,
                                  .num_filled = t.filled.as<int32_t>(),
                                  .x = t.normed.as<bf16>(),
                                  .ids = t.ids.as<int32_t>(),
                                  .weights = t.weights.as<float>()};
      const A2aRound round = exchange.round_of(tokens, 0);
      const bool sends = t.num_own == most() && (senders >> r & 1u) != 0;
      if (t.num_own > 0) route(t, sends ? &round : nullptr);
      if (!sends) exchange.send(round, tokens);
      Arena none;
      batches_.push_back(exchange.wait(round, false, none));
    });
    group_->expect_ok();
  }

  // Compares the lanes of all ranks with the outputs of all routers.
  void check(const std::string& what) {
    std::vector<std::vector<bf16>> rows;
    std::vector<std::vector<int32_t>> ids;
    std::vector<std::vector<float>> weights;
    group_->for_each([&](int r, DeviceCommunicator&) {
      const RankTokens& t = tokens_[static_cast<size_t>(r)];
      rows.push_back(from_device<bf16>(t.normed));
      ids.push_back(from_device<int32_t>(t.ids));
      weights.push_back(from_device<float>(t.weights));
      for (int64_t i = t.num_filled * kTopk; i < most() * kTopk; ++i)
        ids.back()[static_cast<size_t>(i)] = -1, weights.back()[static_cast<size_t>(i)] = 0;
    });
    group_->for_each([&](int r, DeviceCommunicator&) {
      const LaneBatch& batch = batches_[static_cast<size_t>(r)];
      const auto lane_rows = download<bf16>(batch.x.data, num_ranks() * most() * hidden());
      const auto lane_ids = download<int32_t>(batch.ids, num_ranks() * most() * kTopk);
      const auto lane_weights = download<float>(batch.weights, num_ranks() * most() * kTopk);
      for (int s = 0; s < num_ranks(); ++s)
        for (int64_t token = 0; token < most(); ++token) {
          const auto at = static_cast<size_t>(token * kTopk);
          const auto lane = static_cast<size_t>(s * most() + token);
          const std::string where = what + ", rank " + std::to_string(r) + ", lane (" + std::to_string(s) +
                                    ", " + std::to_string(token) + ")";
          bool is_local = false;
          for (size_t k = 0; k < size_t{kTopk}; ++k) {
            const int32_t id = ids[static_cast<size_t>(s)][at + k];
            ASSERT_EQ(lane_ids[lane * kTopk + k], id) << where;
            ASSERT_EQ(lane_weights[lane * kTopk + k], weights[static_cast<size_t>(s)][at + k]) << where;
            is_local = is_local || (id >= 0 && id / size_.shape.experts_per_rank == r);
          }
          const auto bytes = static_cast<size_t>(hidden() * 2);
          ASSERT_TRUE(!is_local ||
                      std::memcmp(&lane_rows[lane * static_cast<size_t>(hidden())],
                                  &rows[static_cast<size_t>(s)][static_cast<size_t>(token * hidden())],
                                  bytes) == 0)
              << where;
        }
    });
  }

  int64_t most() const { return size_.max_tokens; }
  int64_t hidden() const { return size_.shape.hidden_size; }
  std::unique_ptr<TestGroup> group_;

 private:
  static void route(RankTokens& t, const A2aRound* round) {
    const int64_t hidden = t.norm_weight.num_bytes() / 4;
    const RmsNormArgs norm{.x = t.x.as<float>(),
                           .weight = t.norm_weight.as<float>(),
                           .eps = 1e-5f,
                           .out_act = {t.normed.data(), DType::kBF16, t.num_own, hidden},
                           .out_f32 = t.normed_f32.as<float>()};
    const DeviceRouterArgs args{.x = norm.out_f32,
                                .weight = t.gate.as<bf16>(),
                                .num_tokens = t.num_own,
                                .hidden_size = hidden,
                                .rule = {.num_experts = kExperts, .top_k = kTopk},
                                .logits = t.logits.as<float>(),
                                .ids = t.ids.as<int32_t>(),
                                .weights = t.weights.as<float>(),
                                .norm = &norm,
                                .words = t.words.as<RouterWord>(),
                                .round = round};
    EXPECT_TRUE(round == nullptr || sm90_moe_ops()->route_sends(args));
    sm90_moe_ops()->route(args);
  }

  template <class T>
  static std::vector<T> download(const void* from, int64_t n) {
    std::vector<T> values(static_cast<size_t>(n));
    EXPECT_TRUE(device_memory().download(values.data(), from, n * int64_t{sizeof(T)}).ok());
    return values;
  }

  DeviceExchangeSize size_;
  std::vector<DeviceExchange> exchanges_;
  std::vector<RankTokens> tokens_;
  std::vector<LaneBatch> batches_;
  Random random_{3};
};

TEST_P(RoutedRounds, FillTheSameLanes) {
  const unsigned all = (1u << num_ranks()) - 1;
  for (const Size& size : kSizes) {
    make(size);
    for (const unsigned senders : {all, 0u, 1u, all & 0xAAu, all})
      for (const bool is_uneven : {false, true}) {
        draw(is_uneven);
        run(senders);
        check(std::to_string(size.hidden) + " columns, " + std::to_string(size.tokens) + " tokens, senders " +
              std::to_string(senders) + (is_uneven ? ", uneven" : ""));
        if (HasFatalFailure()) return;
      }
  }
}

// The router sends only bf16 rows to ranks that share memory, and only if the round has more than a few
// tokens, all of them its own, and a block of send() for each.
TEST_P(RoutedRounds, AreRefusedOtherwise) {
  make({256, 40});
  group_->for_each([&](int, DeviceCommunicator& group) {
    A2aRound round{.group = group.exchange_group(), .shape = {.hidden_size = 256, .top_k = kTopk}};
    round.num_tokens = round.num_own = 40;
    const Buffer words = on_device(std::vector<RouterWord>(1));  // not used
    DeviceRouterArgs args{.num_tokens = 40,
                          .hidden_size = 256,
                          .rule = {.num_experts = kExperts, .top_k = kTopk},
                          .words = words.as<RouterWord>(),
                          .round = &round};
    const auto sends = [&] { return sm90_moe_ops()->route_sends(args); };
    EXPECT_TRUE(sends());
    round.num_own = 39;
    EXPECT_FALSE(sends());
    round.num_own = 40, round.shape.row_format = A2aRowFormat::kFp8;
    EXPECT_FALSE(sends());
    round.shape.row_format = A2aRowFormat::kBf16, round.shape.is_staged = true;
    EXPECT_FALSE(sends());
    round.shape.is_staged = false, args.batch_invariant = true;
    EXPECT_FALSE(sends());
    args.batch_invariant = false, args.num_tokens = round.num_tokens = round.num_own = 300;
    EXPECT_FALSE(sends()) << "blocks of send() take several tokens";
    args.num_tokens = round.num_tokens = round.num_own = kRouterFewTokens;
    EXPECT_FALSE(sends()) << "few tokens";
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RoutedRounds, testing::Values(1, 2, 4, 8),
                         [](const auto& p) { return std::to_string(p.param); });

}  // namespace
}  // namespace fp4moe
