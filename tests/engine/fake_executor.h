// An executor that runs a fake model.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/fake_kept_drafts.h"
#include "engine/fake_memory.h"
#include "engine/fake_moves.h"
#include "engine/loop_shape.h"

namespace fp4moe {

// One fake model with separate pages per group; `fail`: the next step fails. Large because Executor is large.
class FakeExecutor : public FakeMemory {
 public:
  FakeExecutor(FakeModel& model, const LoopShape& shape)
      : model_(model),
        samples_(shape.samples),
        keeps_draft_ids_(shape.keeps_draft_ids),
        accepts_drafts_(shape.accepts_drafts),
        supports_routed_experts_(shape.supports_routed_experts),
        num_cheap_draft_rows_(shape.num_cheap_draft_rows),
        logits_(
            static_cast<size_t>((shape.scheduler.max_running_requests + shape.num_groups) *
                                (1 + shape.drafts.max_tokens + shape.max_model_drafts) *
                                std::max(model.config().vocab_size,
                                         shape.draft.model ? shape.draft.model->config().vocab_size : 0))),
        draft_(shape.draft.model),
        draft_shape_(draft_shape_of(shape, model.config().vocab_size)) {
    for (int group = 0; group < shape.num_groups; ++group) {
      kv_.push_back(fake_kv(model.config(),
                            {shape.num_pages, shape.num_window_pages, shape.num_slots,
                             shape.drafts.max_tokens + shape.max_model_drafts},
                            shape.page_size));
      if (draft_ != nullptr)
        draft_kv_.push_back(fake_kv(draft_->config(), {shape.num_pages, 0}, shape.page_size));
    }
  }

  const ModelConfig& config() const override { return model_.config(); }
  Status execute_step(std::span<const Batch> groups) override {
    EXPECT_EQ(groups.size(), kv_.size());
    if (!failure().ok()) return failure();
    if (groups[0].model == BatchModel::kDraft) return run_draft(groups);
    float* logits = logits_.data();
    moves_.run(groups, [&](size_t group, Batch batch) {
      const std::vector<int32_t> ids = known_ids(batch.token_ids);
      batch.token_ids = ids;
      if (on_moved) on_moved(batch);
      EXPECT_TRUE(model_.forward_model(batch, kv_[group], logits, pool_).ok());
      if (auto* draft = dynamic_cast<FakeFeatureDraft*>(draft_)) draft->keep_features(group, batch);
      logits += groups[group].logit_rows.size() * static_cast<size_t>(model_.config().vocab_size);
    });
    if (on_step) on_step(groups);
    return {};
  }
  float* logits() override { return logits_.data(); }
  DraftShape draft_shape() const override { return draft_shape_; }
  std::span<const int32_t> draft_token_ids() const override { return draft_->token_ids(); }
  bool keeps_draft_ids() const override { return keeps_draft_ids_; }
  int32_t begin_drafts() override { return keeps_draft_ids_ ? kept_.begin() : 0; }
  int64_t num_cheap_draft_rows() const override { return num_cheap_draft_rows_; }
  Status take_draft_ids(int32_t first, std::span<int32_t> ids) override {
    if (!keeps_draft_ids_) return Executor::take_draft_ids(first, ids);
    num_early_takes += !kept_.is_sampled(first);
    for (int32_t& id : ids) id = kept_.id(first++);
    return {};
  }
  std::atomic<int> num_steps_ahead =
      0;  // steps that were sampled before the tokens of the last one were taken
  std::atomic<int> num_early_takes = 0;  // of draft ids, before the step that verifies them was sampled
  Status supports_routed_experts() const override {
    return supports_routed_experts_ ? Status() : Executor::supports_routed_experts();
  }
  Status failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  ThreadPool& pool() override { return pool_; }
  Status finish_steps() override {
    ++num_finishes;
    return {};
  }
  std::atomic<int> num_finishes = 0;

  void fail(const Status& status) {
    std::lock_guard lock(mutex_);
    failure_ = status;
  }
  std::function<void(std::span<const Batch>)> on_step, on_draft;  // set before the first request
  std::function<void(const Batch&)> on_moved;  // the same, with the rows of each group and pass as computed

  bool samples() const override { return samples_; }
  Status set_masked_ids(std::span<const int32_t> ids) override {
    masked_ids_.assign(ids.begin(), ids.end());
    sampler_.emplace(config().vocab_size, masked_ids_);
    return {};
  }
  // Samples with the host's Sampler through a device executor's interface.
  Status start_sample(std::span<const SampleRowParams> given, std::span<const LogitEdit> edits,
                      std::span<const uint32_t> allowed, std::span<const int32_t> logprob_ids) override {
    if (!sample_failure.ok()) return sample_failure;
    kept_.note_sampling();
    const std::vector<SampleRowParams> rows = moves_.moved(given);
    std::vector<LogitEdit> known_edits(edits.begin(), edits.end());
    for (LogitEdit& edit : known_edits) edit.token_id = known_id(edit.token_id);
    edits = known_edits;
    EXPECT_LT(num_waiting_, 2);
    num_steps_ahead += num_waiting_++;
    std::vector<SampledRow> out(rows.size());
    std::vector<float> id_logprobs(logprob_ids.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto own_ids = logprob_ids.subspan(static_cast<size_t>(rows[i].first_logprob_id),
                                               static_cast<size_t>(rows[i].num_logprob_ids));
      const SamplingParams params{.temperature = rows[i].temperature,
                                  .top_p = rows[i].top_p,
                                  .top_k = rows[i].top_k,
                                  .min_p = rows[i].min_p,
                                  .top_logprobs = rows[i].top_logprobs,
                                  .token_ids_logprob = {own_ids.begin(), own_ids.end()}};
      const auto v = static_cast<size_t>(config().vocab_size);
      const std::span<float> logits(logits_.data() + i * v, v);
      const auto own_edits =
          edits.subspan(static_cast<size_t>(rows[i].first_edit), static_cast<size_t>(rows[i].num_edits));
      const size_t words = (v + 31) / 32;
      const auto own_allowed = rows[i].allowed < 0
                                   ? allowed.first(0)
                                   : allowed.subspan(static_cast<size_t>(rows[i].allowed) * words, words);
      const Result<SampledToken> token =
          rows[i].given_id >= 0 ? sampler_->score(logits, rows[i].given_id, params)
                                : sampler_->sample(logits, params, rows[i].random, own_edits, own_allowed);
      out[i].status = token.ok() ? SampleStatus::kOk : SampleStatus::kBadLogits;
      if (!token.ok()) continue;
      out[i].token_id = token->token_id;
      out[i].logprob = token->logprob;
      out[i].num_top = static_cast<int32_t>(token->top.size());
      for (size_t k = 0; k < token->top.size(); ++k) {
        out[i].top_ids[k] = token->top[k].token_id;
        out[i].top_logprobs[k] = token->top[k].logprob;
      }
      for (size_t k = 0; k < token->ids.size(); ++k)
        id_logprobs[static_cast<size_t>(rows[i].first_logprob_id) + k] = token->ids[k].logprob;
    }
    sampled_.push_back({std::move(out), std::move(id_logprobs)});
    return {};
  }
  Status take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs) override {
    const Sampled& oldest = sampled_.at(sampled_.size() - static_cast<size_t>(num_waiting_--));
    EXPECT_EQ(oldest.rows.size(), out.size());
    EXPECT_EQ(oldest.id_logprobs.size(), id_logprobs.size());
    std::ranges::copy(oldest.rows, out.begin());
    std::ranges::copy(oldest.id_logprobs, id_logprobs.begin());
    return {};
  }
  bool accepts_drafts() const override { return accepts_drafts_; }
  Status accept_drafts() override {
    moves_.accept(sampled_.back().rows, [&](int32_t number) { return kept_.id(number); });
    return {};
  }
  Status sample_failure;       // set before the first request
  Status draft_failure;        // of the next passes of the draft model; set before the first request
  int num_failures_ahead = 0;  // of its next passes over tokens that are not known yet

  // Whether the pass takes tokens that are not known yet.
  static bool is_ahead(std::span<const Batch> groups) {
    return std::ranges::any_of(groups, [](const Batch& batch) {
      return std::ranges::any_of(batch.token_ids, [](int32_t id) { return id < 0 && ~id < kFirstDraft; });
    });
  }

 private:
  int32_t known_id(int32_t id) const {
    if (id >= 0) return id;
    if (~id < kFirstDraft) return sampled_.back().rows.at(static_cast<size_t>(~id)).token_id;
    return std::max(0, kept_.id(~id));
  }
  std::vector<int32_t> known_ids(std::span<const int32_t> ids) const {
    std::vector<int32_t> known;
    for (const int32_t id : ids) known.push_back(known_id(id));
    return known;
  }

  void keep_drafts(size_t num_rows) {
    std::vector<int32_t> ids(num_rows);
    EXPECT_TRUE(Executor::take_draft_ids(0, ids).ok());
    for (const int32_t id : ids) kept_.add(id, masked_ids_);
    EXPECT_LE(kept_.num_ids(), 2 * std::ssize(logits_) / config().vocab_size);
  }

  Status run_draft(std::span<const Batch> groups) {
    if (!draft_failure.ok()) return draft_failure;
    if (is_ahead(groups) && num_failures_ahead-- > 0) return does_not_fit("no memory ahead");
    auto* features = dynamic_cast<FakeFeatureDraft*>(draft_);
    float* logits = logits_.data();
    int64_t num_logit_rows = 0;
    moves_.run(groups, [&](size_t group, Batch batch) {
      const std::vector<int32_t> ids = known_ids(batch.token_ids);
      batch.token_ids = ids;
      if (on_moved) on_moved(batch);
      EXPECT_EQ(batch.model, BatchModel::kDraft);
      EXPECT_LE(batch.num_rows(), draft_shape_.max_batch_tokens);
      for (const int32_t id : batch.token_ids) EXPECT_TRUE(id >= 0 && id < draft_shape_.num_input_ids) << id;
      for (const int64_t position : batch.positions) EXPECT_LT(position, draft_shape_.max_positions);
      expect_separate_rows(batch, page_size());
      if (features != nullptr) features->set_group(group);
      EXPECT_TRUE(draft_->forward_model(batch, draft_kv_[group], logits, pool_).ok());
      logits += std::ssize(batch.logit_rows) * draft_shape_.vocab_size;
      num_logit_rows += std::ssize(batch.logit_rows);
    });
    EXPECT_LE(num_logit_rows, std::max(draft_shape_.max_logit_rows, num_cheap_draft_rows_));
    if (keeps_draft_ids_) keep_drafts(static_cast<size_t>(num_logit_rows));
    if (on_draft) on_draft(groups);
    return {};
  }

  FakeModel& model_;
  const bool samples_, keeps_draft_ids_, accepts_drafts_, supports_routed_experts_;
  const int64_t num_cheap_draft_rows_;
  std::optional<Sampler> sampler_;
  struct Sampled {
    std::vector<SampledRow> rows;
    std::vector<float> id_logprobs;
  };
  std::vector<Sampled> sampled_;  // results of every start_sample()
  int num_waiting_ = 0;           // number of last results that are not yet taken
  std::vector<int32_t> masked_ids_;
  FakeKeptDrafts kept_;
  FakeMoves moves_;
  std::vector<float> logits_;
  Model* const draft_;
  const DraftShape draft_shape_;
  std::vector<KvCache> draft_kv_;
  ThreadPool pool_{2};
  mutable std::mutex mutex_;
  Status failure_;
};

}  // namespace fp4moe
