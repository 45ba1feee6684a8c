#include "model/state_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <span>
#include <vector>

#include "model/kv_cache.h"

namespace fp4moe {
namespace {

// 4 layers; 0, 1 and 3 have states; 4 key heads of 3 and 8 value heads of 5, 4 taps.
ModelConfig with_states() {
  ModelConfig config;
  config.num_layers = 4;
  config.num_heads = config.num_kv_heads = 4;
  config.head_dim = 4;
  config.layer_has_state = {true, true, false, true};
  config.delta = {
      .num_key_heads = 4, .num_value_heads = 8, .key_head_dim = 3, .value_head_dim = 5, .conv_width = 4};
  return config;
}

constexpr int64_t kRecurrent = 8 * 3 * 5, kConv = (2 * 4 * 3 + 8 * 5) * 3;

// The layers' slots tile the memory: every element belongs to one layer, slot and part.
TEST(StateCache, SlotsTileTheMemory) {
  const auto states = StateCache::make(with_states(), 5);
  ASSERT_TRUE(states.ok());
  EXPECT_EQ(StateCache::bytes_per_slot(with_states()), 3 * (kRecurrent + kConv) * 4);
  EXPECT_EQ(states->num_bytes(), 5 * StateCache::bytes_per_slot(with_states()));
  std::map<const float*, int64_t> parts;  // start, elements
  for (const int64_t layer : {0, 1, 3}) {
    const StateSlots slots = states->layer(layer);
    EXPECT_EQ(slots.num_slots, 5);
    parts[slots.recurrent] = 5 * kRecurrent;
    parts[slots.conv] = 5 * kConv;
  }
  EXPECT_EQ(states->layer(2).recurrent, nullptr);
  EXPECT_EQ(states->layer(2).conv, nullptr);
  ASSERT_EQ(parts.size(), 6u);
  const float* end = parts.begin()->first;
  for (const auto& [start, count] : parts) {
    EXPECT_EQ(start, end);
    end = start + count;
  }
  EXPECT_EQ((end - parts.begin()->first) * 4, states->num_bytes());
}

void fill(const StateCache& states, int32_t slot, float value) {
  for (const int64_t layer : {0, 1, 3}) {
    const StateSlots slots = states.layer(layer);
    std::fill_n(slots.recurrent + slot * kRecurrent, kRecurrent, value + static_cast<float>(layer));
    std::fill_n(slots.conv + slot * kConv, kConv, -value - static_cast<float>(layer));
  }
}

void expect_filled(const StateCache& states, int32_t slot, float value) {
  for (const int64_t layer : {0, 1, 3}) {
    const StateSlots slots = states.layer(layer);
    for (int64_t i = 0; i < kRecurrent; ++i)
      ASSERT_EQ(slots.recurrent[slot * kRecurrent + i], value + static_cast<float>(layer)) << slot;
    for (int64_t i = 0; i < kConv; ++i)
      ASSERT_EQ(slots.conv[slot * kConv + i], -value - static_cast<float>(layer)) << slot;
  }
}

// A later copy sees the results of the earlier ones; no other slot changes.
TEST(StateCache, CopiesRunInOrder) {
  const auto states = StateCache::make(with_states(), 5);
  ASSERT_TRUE(states.ok());
  for (int32_t slot = 0; slot < 5; ++slot) fill(*states, slot, 100.0f * static_cast<float>(slot));
  const StateCopy copies[] = {{1, 2}, {2, 3}, {4, 1}, {3, 3}};
  states->copy_slots(copies);
  expect_filled(*states, 0, 0);
  expect_filled(*states, 1, 400);
  expect_filled(*states, 2, 100);
  expect_filled(*states, 3, 100);
  expect_filled(*states, 4, 400);
}

std::span<uint8_t> bytes_of(std::vector<float>& state) {
  return {reinterpret_cast<uint8_t*>(state.data()), state.size() * sizeof(float)};
}

// The ranks of a group write disjoint parts of the canonical form, which are those that its definition names,
// and read back what they wrote. The oracle indexes heads and channels one by one.
TEST(StateCache, CanonicalFormDoesNotDependOnTheSharding) {
  const ModelConfig config = with_states();
  const auto bytes = static_cast<size_t>(StateCache::bytes_per_slot(config));
  std::vector<float> wanted(bytes / 4);
  for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<float>(i + 1);
  for (const int tp : {1, 2, 4}) {
    std::vector<float> together(wanted.size(), 0);
    for (int rank = 0; rank < tp; ++rank) {
      const RankLayout layout{.tp = tp, .ep = 1, .dp = 1, .rank = rank};
      const auto states = StateCache::make(config, 3, layout);
      ASSERT_TRUE(states.ok());
      EXPECT_EQ(StateCache::bytes_per_slot(config, layout) * tp, static_cast<int64_t>(bytes));
      states->write_slot(2, 0, bytes_of(wanted));
      const int64_t keys = 4 / tp, values = 8 / tp, channels = 2 * keys * 3 + values * 5;
      for (const int64_t layer : {0, 1, 3}) {
        const float* const of_layer = wanted.data() + (layer == 3 ? 2 : layer) * (kRecurrent + kConv);
        const StateSlots slots = states->layer(layer);
        for (int64_t i = 0; i < values * 15; ++i)
          ASSERT_EQ(slots.recurrent[2 * values * 15 + i], of_layer[rank * values * 15 + i]);
        for (int64_t c = 0; c < channels; ++c) {
          int64_t all = rank * keys * 3 + c;  // the channel among those of all ranks
          if (c >= keys * 3) all = 12 + rank * keys * 3 + c - keys * 3;
          if (c >= 2 * keys * 3) all = 24 + rank * values * 5 + c - 2 * keys * 3;
          for (int64_t tap = 0; tap < 3; ++tap)
            ASSERT_EQ(slots.conv[(2 * channels + c) * 3 + tap], of_layer[kRecurrent + all * 3 + tap]);
        }
      }
      states->read_slot(2, 0, bytes_of(together));
    }
    EXPECT_EQ(together, wanted) << tp;
  }
}

// In whatever pieces a state is read and written, at any byte and by any number of ranks, it is the whole
// one, and no other slot changes.
TEST(StateCache, PiecesMakeTheWholeState) {
  const ModelConfig config = with_states();
  std::vector<float> wanted(static_cast<size_t>(StateCache::bytes_per_slot(config)) / 4);
  for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<float>(i + 1);
  for (const int tp : {1, 2, 4}) {
    std::vector<StateCache> ranks;
    for (int rank = 0; rank < tp; ++rank) {
      auto states = StateCache::make(config, 3, {.tp = tp, .ep = 1, .dp = 1, .rank = rank});
      ASSERT_TRUE(states.ok());
      ranks.push_back(std::move(*states));
    }
    std::vector<float> zeros(wanted.size());
    for (const StateCache& states : ranks) states.write_slot(2, 0, bytes_of(zeros));
    for (const size_t piece : {size_t{1}, size_t{3}, size_t{64}, size_t{1000}, wanted.size() * 4}) {
      std::vector<float> together(wanted.size());
      const auto for_pieces = [&](std::vector<float>& state, const auto& copy) {
        const std::span<uint8_t> all = bytes_of(state);
        for (size_t first = 0; first < all.size(); first += piece)
          for (const StateCache& states : ranks)
            copy(states, static_cast<int64_t>(first),
                 all.subspan(first, std::min(piece, all.size() - first)));
      };
      for_pieces(wanted,
                 [](const StateCache& s, int64_t first, auto bytes) { s.write_slot(1, first, bytes); });
      for_pieces(together,
                 [](const StateCache& s, int64_t first, auto bytes) { s.read_slot(1, first, bytes); });
      EXPECT_EQ(together, wanted) << tp << " ranks, pieces of " << piece;
      for_pieces(together,
                 [](const StateCache& s, int64_t first, auto bytes) { s.read_slot(2, first, bytes); });
      EXPECT_EQ(together, zeros) << tp;
      for (const StateCache& states : ranks) states.write_slot(1, 0, bytes_of(zeros));
    }
    EXPECT_TRUE(ranks[0].pieces(1, static_cast<int64_t>(wanted.size()) * 4, 0).empty());
  }
}

// Replay rows are beside the states, each layer and slot has its own, and copies leave them alone.
TEST(StateCache, ReplayRowsAreSeparate) {
  const ModelConfig config = with_states();
  constexpr int64_t kColumns = 2 * 4 * 3 + 8 * 5 + 2 * 8;  // channels, b and a
  EXPECT_EQ(StateCache::bytes_per_replay_row(config), 3 * kColumns * 4);
  EXPECT_EQ(StateCache::bytes_per_replay_row(config, {.tp = 4, .ep = 1, .dp = 1, .rank = 1}) * 4,
            StateCache::bytes_per_replay_row(config));
  const auto states = StateCache::make(config, {5, 2});
  ASSERT_TRUE(states.ok());
  EXPECT_EQ(states->num_bytes(),
            5 * (StateCache::bytes_per_slot(config) + 2 * StateCache::bytes_per_replay_row(config)));
  EXPECT_EQ(states->layer(2).replay, nullptr);
  std::vector<float*> rows;
  for (const int64_t layer : {0, 1, 3}) {
    EXPECT_EQ(states->layer(layer).num_replay_rows, 2);
    rows.push_back(states->layer(layer).replay);
    std::fill_n(rows.back(), 5 * 2 * kColumns, static_cast<float>(layer + 1));
  }
  EXPECT_EQ(rows[1] - rows[0], 5 * 2 * kColumns);
  EXPECT_EQ(rows[2] - rows[1], 5 * 2 * kColumns);
  states->copy_slots(std::vector<StateCopy>{{1, 2}});
  for (size_t layer = 0; layer < 3; ++layer)
    EXPECT_EQ(std::count(rows[layer], rows[layer] + 5 * 2 * kColumns, layer == 2 ? 4.0f : layer + 1.0f),
              5 * 2 * kColumns);
  EXPECT_EQ(StateCache::make(config, 5)->layer(0).replay, nullptr);
}

TEST(StateCache, RefusesImpossiblePools) {
  ModelConfig config = with_states();
  for (const int64_t num_slots : {int64_t{-1}, int64_t{0}, INT64_MAX / 2, int64_t{1} << 40})
    EXPECT_EQ(StateCache::make(config, num_slots).status().code(), StatusCode::kInvalidArgument) << num_slots;
  for (const int64_t num_replay_rows : {-1, 17})
    EXPECT_EQ(StateCache::make(config, {2, num_replay_rows}).status().code(), StatusCode::kInvalidArgument);
  const auto shared = StateCache::make(config, 2, {.tp = 3, .ep = 1, .dp = 1, .rank = 0});
  ASSERT_FALSE(shared.ok());
  EXPECT_NE(shared.status().message().find("linear_num_key_heads 4"), std::string::npos)
      << shared.status().message();
  EXPECT_TRUE(StateCache::make(config, 2, {.tp = 3, .ep = 1, .dp = 3, .rank = 1}).ok());
  config.layer_has_state = {};
  EXPECT_FALSE(StateCache::make(config, 2).ok());
  EXPECT_TRUE(StateCache::make(config, 0).ok());
  EXPECT_EQ(StateCache::bytes_per_slot(config), 0);
}

// Layers with states have no pages, and the others' pages are as large as those of a model of these layers.
TEST(StateCache, LayersWithStatesHaveNoPages) {
  const ModelConfig config = with_states();
  ModelConfig attends = config;
  attends.layer_has_state = {};
  attends.num_layers = 1;
  const KvCounts bytes = KvCache::bytes_per_page(config, DType::kBF16, 16);
  EXPECT_EQ(bytes.full, KvCache::bytes_per_page(attends, DType::kBF16, 16).full);
  EXPECT_EQ(bytes.slots, StateCache::bytes_per_slot(config));
  const auto kv = KvCache::make(config, DType::kBF16, {.full = 7, .slots = 3}, 16);
  ASSERT_TRUE(kv.ok());
  EXPECT_EQ(kv->num_bytes(), 7 * bytes.full + 3 * bytes.slots);
  EXPECT_EQ(kv->token_bytes() * 16, bytes.full);
  for (int64_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(kv->k_pages(layer).data == nullptr, config.has_state(layer));
    EXPECT_EQ(kv->v_pages(layer).data == nullptr, config.has_state(layer));
    EXPECT_EQ(kv->states(layer).recurrent != nullptr, config.has_state(layer));
  }
  EXPECT_FALSE(KvCache::make(config, DType::kBF16, {.full = 7}, 16).ok()) << "no slots";
  ModelConfig none = config;
  none.layer_has_state = {true, true, true, true};
  EXPECT_FALSE(KvCache::make(none, DType::kBF16, {.full = 7, .slots = 3}, 16).ok()) << "no layer attends";
}

}  // namespace
}  // namespace fp4moe
