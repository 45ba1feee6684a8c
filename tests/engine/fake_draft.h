// Draft models for the fake executor: FakeModel for one that takes tokens alone, FakeFeatureDraft for one
// that continues a target's features.
#pragma once

#include <algorithm>
#include <cmath>
#include <set>

#include "engine/fake_model.h"
#include "engine/ranks/draft_shape.h"

namespace fp4moe {

// Sequences share pages, but no two rows of a pass write to the same place.
inline void expect_separate_rows(const Batch& batch, int page_size) {
  std::set<int64_t> places;
  for (const SequenceRows& rows : batch.sequences) {
    ASSERT_LE(rows.first_position + rows.num_rows, std::ssize(rows.page_table) * page_size);
    for (int64_t p = rows.first_position; p < rows.first_position + rows.num_rows; ++p) {
      const int64_t page = rows.page_table[static_cast<size_t>(p / page_size)];
      EXPECT_TRUE(places.insert(page * page_size + p % page_size).second) << "position " << p;
    }
  }
}

// A draft model that a test lends to a fake executor. Sizes of 0 are those of the target and the step loop.
struct FakeDraft {
  Model* model = nullptr;  // null: no draft model
  DraftShape shape = {};
};

// A row's feature is the token at its position; the row takes the token after it. Layer 0 of the pages holds
// the feature's token, layer 1 the row's, so the feature of a row has to be the token of the row before.
class FakeFeatureDraft : public Model {
 public:
  FakeFeatureDraft(ModelConfig config, FakeLogits logits, size_t num_groups = 1)
      : config_(std::move(config)), logits_(std::move(logits)), features_(2, Groups(num_groups)) {}

  const ModelConfig& config() const override { return config_; }
  int64_t weight_bytes() const override { return 0; }
  const ExpertCounters& expert_counters() const override { return *counters_; }
  std::span<const int32_t> token_ids() const override { return ids; }

  // Called with the batches of every pass of the target, with known tokens.
  void keep_features(size_t group, const Batch& target) {
    features_[0][group].assign(target.token_ids.begin(), target.token_ids.end());
  }
  // The group of the next forward_model().
  void set_group(size_t group) { group_ = group; }

  Status forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool&) override {
    run(batch, kv, logits);
    return {};
  }

  std::vector<int32_t> ids;  // token_ids()
  bool runs_ahead = false;   // a pass may have rows that follow a wrong draft

 private:
  using Groups = std::vector<std::vector<int32_t>>;

  void run(const Batch& batch, KvCache& kv, float* logits) {
    ASSERT_EQ(batch.feature_rows.size(), batch.token_ids.size());
    const std::vector<int32_t>& source = features_[batch.chains ? 1 : 0][group_];
    const int page_size = kv.page_size();
    const auto slot = [&](const SequenceRows& s, int64_t layer, int64_t position) -> float& {
      const int32_t page = s.page_table[static_cast<size_t>(position / page_size)];
      return static_cast<float*>(kv.k_pages(layer).data)[page * page_size + position % page_size];
    };
    std::vector<int32_t> own(batch.token_ids.size());
    auto wanted = batch.logit_rows.begin();
    for (const SequenceRows& s : batch.sequences) {
      for (int64_t row = s.first_row; row < s.first_row + s.num_rows; ++row) {
        const int64_t position = s.first_position + row - s.first_row;
        const int64_t feature = batch.feature_rows[static_cast<size_t>(row)];
        ASSERT_LT(feature, std::ssize(source));
        slot(s, 0, position) = static_cast<float>(source[static_cast<size_t>(feature)]);
        slot(s, 1, position) = static_cast<float>(batch.token_ids[static_cast<size_t>(row)]);
        own[static_cast<size_t>(row)] = batch.token_ids[static_cast<size_t>(row)];
      }
      for (; wanted != batch.logit_rows.end() && *wanted < s.first_row + s.num_rows; ++wanted) {
        const int64_t last = s.first_position + *wanted - s.first_row;
        std::vector<int32_t> history;
        bool is_in_vain = false;
        for (int64_t p = 0; p <= last; ++p) {
          // The last row of a reused page may have been computed for another next token.
          const bool is_wrong = p % page_size != 0 && slot(s, 0, p) != slot(s, 1, p - 1);
          is_in_vain = is_in_vain || (is_wrong && runs_ahead && !batch.chains && p > s.first_position);
          EXPECT_TRUE(!is_wrong || is_in_vain) << "position " << p << " of " << last;
          history.push_back(static_cast<int32_t>(slot(s, 0, p)));
        }
        history.push_back(static_cast<int32_t>(slot(s, 1, last)));
        const std::span<float> row(logits, static_cast<size_t>(config_.vocab_size));
        logits_(history, row);
        if (is_in_vain) std::ranges::fill(row, std::nanf(""));  // chooses no draft
        logits += config_.vocab_size;
      }
    }
    features_[1][group_] = own;
  }

  const std::unique_ptr<ExpertCounters> counters_ = ExpertCounters::make({}, 0).value();
  ModelConfig config_;
  FakeLogits logits_;
  std::vector<Groups> features_;  // of the target's and of this model's last pass
  size_t group_ = 0;
};

}  // namespace fp4moe
