// A Model with almost no computation: it stores token ids in the KV pages and derives logits from the ids
// that it reads back through the page tables, so that lost, shared or misplaced pages change its output.
// Layer 0 holds all tokens; layer 1 may have a window, and the tokens in it are those that layer 1's pages
// hold. Layer 2, if there is one, has a state: a hash of all tokens so far, and their number. It is part of
// the logits, so that a wrong slot, a stale snapshot or a missing copy changes the output. Replay rows hold
// the ids of drafts, so a wrong number of replayed rows changes it too.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "model/kv_cache.h"
#include "model/model.h"

namespace fp4moe {

inline ModelConfig fake_config(int64_t vocab_size, std::vector<int32_t> eos_token_ids = {},
                               int64_t window = 0, bool has_state = false) {
  ModelConfig config;
  config.layer_windows = {0, window};
  config.vocab_size = vocab_size;
  config.num_layers = config.top_k = 2;  // only routed experts depend on these
  if (has_state) {
    config.num_layers = 3;
    config.layer_has_state = {false, false, true};
    config.delta = {
        .num_key_heads = 1, .num_value_heads = 1, .key_head_dim = 1, .value_head_dim = 1, .conv_width = 2};
  }
  config.num_kv_heads = config.num_heads = config.head_dim = 1;
  config.eos_token_ids = std::move(eos_token_ids);
  return config;
}

// KV pages with one float per token, which is all the state that the fake model needs.
inline KvCache fake_kv(const ModelConfig& config, KvCounts num_pages, int page_size) {
  Result<KvCache> kv = KvCache::make(config, DType::kF32, num_pages, page_size);
  EXPECT_TRUE(kv.ok()) << kv.status().to_string();
  return std::move(*kv);
}

// Computes the logits of the token after `history`.
using FakeLogits = std::function<void(std::span<const int32_t> history, std::span<float> logits)>;

// Sets every logit to a hash of the whole history, in [-4, 4).
inline void hashed_logits(std::span<const int32_t> history, std::span<float> logits) {
  uint64_t h = 1469598103934665603u;  // FNV-1a
  for (const int32_t id : history) h = (h ^ static_cast<uint64_t>(id)) * 1099511628211u;
  for (float& x : logits) {
    h = h * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(h >> 40) * 0x1p-24f * 8 - 4;
  }
}

// Logits that put nearly all probability on the id that `next` returns.
inline FakeLogits certain_logits(std::function<int32_t(std::span<const int32_t>)> next) {
  return [next = std::move(next)](std::span<const int32_t> history, std::span<float> logits) {
    std::fill(logits.begin(), logits.end(), -20.0f);
    logits[static_cast<size_t>(next(history))] = 0;
  };
}

// The state after one more token: a number below 2^24, which a float holds exactly.
inline float next_state(float state, int32_t id) {
  const auto before = static_cast<uint64_t>(state);
  return static_cast<float>((((before + 1) * 1099511628211u) ^ static_cast<uint64_t>(id)) * 2654435761u %
                            (1u << 24));
}

// hashed_logits() with the state as one more token, as the model with a state computes them.
inline void hashed_logits_and_state(std::span<const int32_t> history, std::span<float> logits) {
  std::vector<int32_t> with_state(history.begin(), history.end());
  float state = 0;
  for (const int32_t id : history) state = next_state(state, id);
  with_state.push_back(static_cast<int32_t>(state));
  hashed_logits(with_state, logits);
}

// The two experts that a token is routed to in a layer.
inline std::vector<int32_t> fake_experts(int32_t token_id, int64_t position, int64_t layer) {
  return {token_id, static_cast<int32_t>(position * 2 + layer)};
}

class FakeModel : public Model {
 public:
  explicit FakeModel(ModelConfig config, FakeLogits logits = hashed_logits)
      : config_(std::move(config)), logits_(std::move(logits)) {}

  const ModelConfig& config() const override { return config_; }
  int64_t weight_bytes() const override { return 0; }
  const ExpertCounters& expert_counters() const override { return *counters_; }

  Status forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool&) override {
    run(batch, kv, logits);
    return {};
  }

  std::function<void(const Batch&)> before_forward;  // set before the first request; can block or throw

 private:
  void run(const Batch& batch, KvCache& kv, float* logits) {
    if (before_forward) before_forward(batch);
    const KvPages pages = kv.k_pages(0), window_pages = kv.k_pages(1);
    const bool splits = kv.layers_of(1) == KvLayers::kWindow;
    const int64_t window = splits ? config_.layer_windows[1] : 0;
    const auto slot = [&](const SequenceRows& s, int64_t position) -> float& {
      const int32_t page = s.page_table[static_cast<size_t>(position / pages.page_size)];
      return static_cast<float*>(pages.data)[page * pages.page_size + position % pages.page_size];
    };
    const auto window_slot = [&](const SequenceRows& s, int64_t position) -> float& {
      const auto index = static_cast<size_t>(position / pages.page_size);
      EXPECT_LT(index, s.window_page_table.size());
      const int32_t page = s.window_page_table[index];
      EXPECT_LT(page, kv.num_pages(KvLayers::kWindow));
      return static_cast<float*>(window_pages.data)[page * pages.page_size + position % pages.page_size];
    };
    const std::vector<float> states = run_states(batch, kv);
    auto wanted = batch.logit_rows.begin();
    int64_t next_row = 0;
    for (const SequenceRows& s : batch.sequences) {
      ASSERT_EQ(s.first_row, next_row);
      next_row += s.num_rows;
      for (int64_t i = 0; i < s.num_rows; ++i) {
        const size_t row = static_cast<size_t>(s.first_row + i);
        ASSERT_EQ(batch.positions[row], s.first_position + i);
        slot(s, s.first_position + i) = static_cast<float>(batch.token_ids[row]);
        if (splits) window_slot(s, s.first_position + i) = static_cast<float>(batch.token_ids[row]);
        tell_experts(batch, s.first_row + i, 0, s.first_row + i);
      }
      if (splits) check_window(s, window, slot, window_slot);
      for (; wanted != batch.logit_rows.end() && *wanted < next_row; ++wanted) {
        std::vector<int32_t> history;
        const int64_t last = s.first_position + *wanted - s.first_row;
        for (int64_t p = 0; p <= last; ++p)
          history.push_back(
              static_cast<int32_t>(splits && p > last - window ? window_slot(s, p) : slot(s, p)));
        if (!states.empty()) history.push_back(static_cast<int32_t>(states[static_cast<size_t>(*wanted)]));
        logits_(history, {logits, static_cast<size_t>(config_.vocab_size)});
        logits += config_.vocab_size;
        tell_experts(batch, *wanted, 1, wanted - batch.logit_rows.begin());
      }
    }
    ASSERT_EQ(next_row, static_cast<int64_t>(batch.token_ids.size()));
    ASSERT_TRUE(wanted == batch.logit_rows.end());
  }

  // Returns the state after each row; empty without a layer that has one.
  static std::vector<float> run_states(const Batch& batch, KvCache& kv) {
    kv.state_cache().copy_slots(batch.state_copies);
    std::vector<float> states;
    if (kv.state_cache().num_slots() == 0) return states;
    const StateSlots slots = kv.states(2);
    for (const SequenceRows& s : batch.sequences) {
      EXPECT_TRUE(s.slot > 0 && s.slot < slots.num_slots) << s.slot;
      EXPECT_LE(std::max(s.num_replayed, s.num_tentative), slots.num_replay_rows);
      float* const conv = slots.conv + s.slot * 3;
      const auto replay = [&](int64_t row) -> float& {
        return slots.replay[(s.slot * slots.num_replay_rows + row) * 5];
      };
      float state = s.first_position == 0 ? 0 : slots.recurrent[s.slot];
      if (s.first_position > 0) {
        EXPECT_EQ(conv[0], static_cast<float>(s.first_position - s.num_replayed)) << "slot " << s.slot;
      }
      for (int64_t i = 0; i < s.num_replayed; ++i) state = next_state(state, static_cast<int32_t>(replay(i)));
      const int64_t num_committed = s.num_rows - s.num_tentative;
      for (int64_t i = 0; i < s.num_rows; ++i) {
        const int32_t id = batch.token_ids[static_cast<size_t>(s.first_row + i)];
        states.push_back(state = next_state(state, id));
        if (i < num_committed) slots.recurrent[s.slot] = state;
        if (i >= num_committed) replay(i - num_committed) = static_cast<float>(id);
      }
      conv[0] = static_cast<float>(s.first_position + num_committed);
    }
    return states;
  }

  // Every row finds the tokens in its window in layer 1's pages.
  static void check_window(const SequenceRows& s, int64_t window, const auto& slot, const auto& window_slot) {
    const int64_t first = std::max<int64_t>(0, s.first_position - window + 1);
    for (int64_t p = first; p < s.first_position + s.num_rows; ++p)
      ASSERT_EQ(window_slot(s, p), slot(s, p)) << "position " << p << " of rows from " << s.first_position;
  }

  void tell_experts(const Batch& batch, int64_t row, int64_t layer, int64_t place) const {
    if (batch.routed_experts == nullptr) return;
    const auto r = static_cast<size_t>(row);
    const auto experts = fake_experts(batch.token_ids[r], batch.positions[r], layer);
    std::ranges::copy(experts, batch.routed_experts + (layer * batch.num_rows() + place) * config_.top_k);
  }

  const std::unique_ptr<ExpertCounters> counters_ = ExpertCounters::make({}, 0).value();
  ModelConfig config_;
  FakeLogits logits_;
};

}  // namespace fp4moe
