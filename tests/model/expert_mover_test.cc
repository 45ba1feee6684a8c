// Experts that move between thread ranks: each physical expert has the weights of its logical expert
// afterwards, on every rank and for every placement; an error names its rank.
#include "model/expert_mover.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <latch>
#include <random>
#include <string>
#include <utility>

#include "comm/faulty_endpoint.h"
#include "comm/rank_threads.h"
#include "io/status_matchers.h"
#include "moe/placement/expert_balance.h"

namespace fp4moe {
namespace {

using test::on_every_rank;
using test::threads_job;

// Byte i of a logical expert of a layer.
uint8_t weight_byte(int64_t layer, int64_t expert, int64_t i) {
  return static_cast<uint8_t>(expert * 37 + layer * 11 + i * 5 + 1);
}

// A layer whose experts are bytes.
class ByteExperts final : public PlacedExperts {
 public:
  ByteExperts(const PlacementShape& shape, int64_t layer, int rank, int64_t expert_bytes)
      : placement_(ExpertPlacement::trivial(shape)), rank_(rank), expert_bytes_(expert_bytes) {
    for (int64_t local = 0; local < shape.experts_per_rank(); ++local)
      for (int64_t i = 0; i < expert_bytes; ++i) weights_.push_back(weight_byte(layer, expert_at(local), i));
  }
  const ExpertPlacement& placement() const override { return placement_; }
  Status set_placement(ExpertPlacement placement) override {
    placement_ = std::move(placement);
    return {};
  }
  int64_t expert_bytes() const override { return expert_bytes_; }
  // Copies run late, as on a GPU.
  Status read_expert(int64_t local, int64_t first, std::span<uint8_t> to) const override {
    if (fails) return data_loss("a broken expert");
    copies_.push_back([=, this] { std::copy_n(weights_.data() + at(local, first), to.size(), to.data()); });
    return {};
  }
  Status write_expert(int64_t local, int64_t first, std::span<const uint8_t> from) override {
    copies_.push_back(
        [=, this] { std::copy_n(from.data(), from.size(), weights_.data() + at(local, first)); });
    return {};
  }
  Status finish_copies() override {
    for (const auto& copy : std::exchange(copies_, {})) copy();
    return {};
  }
  bool has_its_experts(int64_t layer) const {
    for (size_t at = 0; at < weights_.size(); ++at) {
      const auto i = static_cast<int64_t>(at);
      if (weights_[at] != weight_byte(layer, expert_at(i / expert_bytes_), i % expert_bytes_)) return false;
    }
    return true;
  }

  bool fails = false;

 private:
  int64_t expert_at(int64_t local) const {
    return placement_.logical(rank_ * placement_.shape().experts_per_rank() + local);
  }
  int64_t at(int64_t local, int64_t first) const { return local * expert_bytes_ + first; }
  ExpertPlacement placement_;
  const int rank_;
  const int64_t expert_bytes_;
  std::vector<uint8_t> weights_;
  mutable std::vector<std::function<void()>> copies_;
};

constexpr int64_t kLayers[] = {1, 3};

// One rank's layers and counters.
struct RankLayers {
  RankLayers(const PlacementShape& shape, int rank, int64_t expert_bytes)
      : counters(ExpertCounters::make({kLayers[0], kLayers[1]}, shape.num_logical).value()) {
    for (const int64_t layer : kLayers)
      experts.push_back(std::make_unique<ByteExperts>(shape, layer, rank, expert_bytes));
    for (const auto& layer : experts) placed.push_back(layer.get());
  }
  // Counts rows of a few hot experts, which differ between rounds, layers and ranks.
  void count(uint32_t seed) {
    std::mt19937 random(seed);
    const auto num = static_cast<uint32_t>(counters->num_experts());
    for (const int64_t layer : kLayers)
      for (int i = 0; i < 400; ++i) {
        const auto id = static_cast<int32_t>((random() % num) * (random() % num) / num);
        counters->add(layer, {{(id + static_cast<int32_t>(seed)) % static_cast<int32_t>(num)}});
      }
  }

  std::unique_ptr<ExpertCounters> counters;
  std::vector<std::unique_ptr<ByteExperts>> experts;
  std::vector<PlacedExperts*> placed;
};

struct Shape {
  int ranks;
  int64_t logical, redundant, expert_bytes;
};

// Ranks that exchange slices of experts through area_bytes each: far ones over their fabric.
struct Case {
  Shape shape;
  int64_t area_bytes;
  bool far;
};

CommRegion region() { return {.record_bytes = 256, .staging_bytes = 4096}; }
int64_t heap_bytes(int ranks) { return Communicator::heap_bytes(ranks, 256, 4096); }

TEST(ExpertMover, EveryPhysicalExpertHasItsWeightsAfterEachMove) {
  const Shape shapes[] = {{1, 5, 2, 100}, {2, 8, 0, 3000}, {2, 8, 4, 1}, {3, 7, 2, 777}, {4, 32, 8, 5000}};
  std::vector<Case> cases;
  for (const Shape& s : shapes)
    for (const int64_t area_bytes : {40, 9000, 1 << 20})
      for (const bool far : {false, true})
        if (s.expert_bytes < 20 * area_bytes) cases.push_back({s, area_bytes, far});
  for (const auto& [s, area_bytes, far] : cases) {
    const std::string text = std::to_string(s.ranks) + " ranks, experts of " +
                             std::to_string(s.expert_bytes) + " bytes, areas of " +
                             std::to_string(area_bytes) + (far ? ", far ranks" : "");
    SCOPED_TRACE(text);
    const PlacementShape shape = {s.logical, s.logical + s.redundant, s.ranks};
    const auto job = threads_job(s.ranks, heap_bytes(s.ranks), 0);
    std::vector<ExpertMoves> first(static_cast<size_t>(s.ranks));
    std::vector<int64_t> moved(static_cast<size_t>(s.ranks));
    on_every_rank(s.ranks, [&](int rank) {
      test::FaultyEndpoint far_endpoint(job->endpoint(rank), {});  // which shares no addresses
      Endpoint& endpoint = far ? far_endpoint : job->endpoint(rank);
      std::optional<Communicator> world;
      if (s.ranks > 1) world.emplace(endpoint, 0, s.ranks, region(), CommOptions{});
      RankLayers layers(shape, rank, s.expert_bytes);
      ExpertMover mover(world ? &*world : nullptr, *layers.counters, {.num_bytes = area_bytes});
      for (uint32_t round = 0; round < 6; ++round) {
        layers.count(100 * round + static_cast<uint32_t>(rank));
        const Result<ExpertMoves> moves = mover.rebalance(layers.placed);
        ASSERT_TRUE(is_ok(moves.status()));
        EXPECT_EQ(moves->num_bytes, moves->num_experts * s.expert_bytes);
        for (size_t i = 0; i < layers.experts.size(); ++i)
          EXPECT_TRUE(layers.experts[i]->has_its_experts(kLayers[i]))
              << text << ", round " << round << " rank " << rank;
        if (round == 0) first[static_cast<size_t>(rank)] = *moves;
        moved[static_cast<size_t>(rank)] += moves->num_experts;
      }
      const Result<ExpertMoves> idle = mover.rebalance(layers.placed);
      ASSERT_TRUE(is_ok(idle.status()));
      EXPECT_EQ(idle->num_experts, 0) << "moved without rows since the last call";
    });
    for (int rank = 0; rank < s.ranks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      EXPECT_EQ(moved[r], moved[0]) << "rank " << rank << " computed other placements";
      EXPECT_EQ(first[r].imbalance_after, first[0].imbalance_after);
    }
    EXPECT_EQ(moved[0] > 0, s.ranks > 1);
  }
}

TEST(ExpertMover, AnErrorOfOneRankEndsTheOthers) {
  const PlacementShape shape = {8, 12, 2};
  const auto job = threads_job(2, heap_bytes(2), 0);
  std::vector<Status> statuses(2);
  std::latch both_ended(2);  // until then one may write to the other's area
  on_every_rank(2, [&](int rank) {
    Communicator world(job->endpoint(rank), 0, 2, region(), {});
    RankLayers layers(shape, rank, 100);
    layers.count(5);
    for (const auto& layer : layers.experts) layer->fails = rank == 1;
    ExpertMover mover(&world, *layers.counters);
    const Status status = mover.rebalance(layers.placed).status();
    if (rank == 1) job->endpoint(rank).fail(status.with_context("rank 1"));  // as StepRunner does
    statuses[static_cast<size_t>(rank)] = status;
    both_ended.arrive_and_wait();
  });
  EXPECT_EQ(statuses[1].message(), "a broken expert");
  EXPECT_NE(statuses[0].message().find("rank 1"), std::string::npos) << statuses[0].message();
}

}  // namespace
}  // namespace fp4moe
