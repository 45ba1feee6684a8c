// Three sequences in a target, each continued by a draft model, pass by pass. Sources that include this
// header need the definition FP4MOE_MODELS.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/ranks/draft_layouts.h"
#include "engine/ranks/group_pass.h"
#include "engine/ranks/growing.h"
#include "engine/startup/draft_checkpoint.h"
#include "engine/trained_drafts.h"
#include "model/plan_draft.h"

namespace fp4moe {

// Rows of logits and the chosen ids of all passes of a draft model, sequence by sequence in each pass.
struct Drafts {
  std::vector<std::vector<float>> logits;
  std::vector<int32_t> ids;
};

// The tokens are given, so that two runs compute the same rows. Data-parallel group g of n has the sequences
// g, g + n, ...; a group without any is idle.
class Drafting {
 public:
  Drafting(const TrainedDraft& drafter, EngineConfig flags) {
    flags = with_trained_drafts(std::move(flags), drafter);
    flags.model_path = models() + "/" + drafter.model;
    if (!flags.speculative_draft_model_path.empty())
      flags.speculative_draft_model_path = models() + "/" + drafter.draft;
    config_ = load_model_config(flags.model_path).value();
    Result<ModelPlan> planned = plan_model(config_, flags);
    if (!planned.ok()) throw std::runtime_error(planned.status().to_string());
    ModelPlan plan = std::move(*planned);
    plan.draft = plan_draft(config_, plan).value();
    const Checkpoint target = Checkpoint::open(flags.model_path).value();
    const std::optional<Checkpoint> draft = open_draft(plan.draft.get(), config_, "auto").value();
    RankGroupOptions options = kOptions;
    options.max_logit_rows *= rows_per_request(plan.flags) * plan.moe.problem().layout.dp;
    auto made = RankGroup::make(target, config_, plan, plan.flags, options, draft ? &*draft : nullptr);
    if (!made.ok()) throw std::runtime_error(made.status().to_string());
    ranks_ = std::move(*made);
    for (int32_t s = 0; s < 3; ++s)
      for (int32_t i = 0; i < kPagesEach; ++i) pages_[s].push_back(s + 3 * (kPagesEach - 1 - i));
  }

  // The prompts, then chains of two passes and a step that verifies them. If `stay`, the host knows no draft
  // before the last step. Returns the logits of the draft model's rows and of the last step's, and the
  // drafts.
  Drafts chain(bool stay) {
    step(kPrompts, 0);
    drafts_ = {};
    first_id_ = ranks_->begin_drafts();
    std::vector<std::vector<int32_t>> rows(3);
    for (int32_t i = 0; i < 3; ++i) {
      Passes pass = new_passes();
      for (size_t s = 0; s < 3; ++s) {
        rows[s].push_back(i == 0 ? id_at(s, first_[s]) : drafts_of_[s]);
        GroupPass& group = add(pass, s, {rows[s].back()}, first_[s] + i);
        group.feature_rows.push_back(std::ssize(group.ids) - 1);
        group.want_logits(s, std::ssize(group.ids) - 1);
      }
      execute(pass, BatchModel::kDraft, i > 0);
      take_logits(pass, ranks_->draft_shape().vocab_size);
      keep_ids(pass, i, stay);
    }
    Passes target = new_passes();
    for (size_t s = 0; s < 3; ++s) {
      rows[s].push_back(drafts_of_[s]);
      add_with_logits(target, s, rows[s], first_[s]);
    }
    execute(target, BatchModel::kTarget, false);
    take_logits(target, config_.vocab_size);
    take_ids(drafts_.ids);
    return std::move(drafts_);
  }

  // The prompts, then a step whose rows are extended with the tokens that they sample, before the host takes
  // them if `ahead`.
  Drafts extend(bool ahead) {
    step(kPrompts, 0);
    drafts_ = {};
    Passes target = new_passes();
    for (size_t s = 0; s < 3; ++s) add_with_logits(target, s, {3, static_cast<int32_t>(s)}, first_[s]);
    execute(target, BatchModel::kTarget, false);
    SampleRowParams greedy;
    greedy.temperature = 0;
    const std::vector<SampleRowParams> params(6, greedy);
    EXPECT_TRUE(ranks_->start_sample(params, {}, {}, {}).ok());
    std::vector<SampledRow> sampled(6);
    const auto take = [&] { EXPECT_TRUE(ranks_->take_sampled(sampled, {}).ok()); };
    if (!ahead) take();
    Passes draft = new_passes();
    size_t row = 0;
    for (GroupPass& group : target)
      for (size_t i = 0; i < group.owners.size(); i += 2, row += 2) {
        std::vector<int32_t> ids;
        for (const size_t r : {row, row + 1})
          ids.push_back(ahead ? ~static_cast<int32_t>(r) : sampled[r].token_id);
        GroupPass& to = add_with_logits(draft, group.owners[i], ids, first_[group.owners[i]]);
        to.feature_rows = to.logit_rows;
      }
    keep(draft, false);
    if (ahead) take();
    for (const SampledRow& one : sampled) drafts_.ids.push_back(one.token_id);
    return std::move(drafts_);
  }

  // The prompts, then steps whose rows are padded, one row each and several each, of all sequences and of
  // one; after each step two chained passes. Wrong rows are dropped.
  Drafts run() {
    step(kPrompts, 0);
    for (int32_t i = 0; i < 3; ++i) {
      step({{i, 7, 8, 9}, {i + 1}, {5, i}}, i % 2);
      step({{3}, {i}, {9}}, 0);
      std::vector<std::vector<int32_t>> one(3);
      one[static_cast<size_t>(i)] = {4, i, 6};
      step(one, 1);
    }
    return std::move(drafts_);
  }
  // Rows of logits of the draft model in run(): passes of 3 sequences and of one.
  static constexpr size_t kRunRows = 3 * (1 + 2 * 3) * 3 + 3 * 3;

 private:
  Passes new_passes() const { return Passes(static_cast<size_t>(ranks_->num_groups())); }
  static int32_t id_at(size_t s, int64_t position) {
    return static_cast<int32_t>((position * 37 + 11 * static_cast<int64_t>(s)) % 97);
  }

  // Runs the tokens, then the draft model's rows with the tokens after them.
  void step(const std::vector<std::vector<int32_t>>& more, int64_t num_dropped) {
    Passes target = new_passes(), draft = new_passes();
    const bool is_prompt = more == kPrompts;
    for (size_t s = 0; s < 3; ++s) {
      if (more[s].empty()) continue;
      GroupPass& rows = add(target, s, more[s], first_[s]);
      const int64_t end = std::ssize(rows.ids), begin = end - std::ssize(more[s]);
      for (int64_t row = is_prompt ? end - 1 : begin; row < end; ++row) rows.want_logits(s, row);
    }
    execute(target, BatchModel::kTarget, false);
    std::vector<int64_t> target_rows(target.size());
    for (size_t s = 0; s < 3; ++s) {
      if (more[s].empty()) continue;
      const int64_t count = std::max<int64_t>(1, std::ssize(more[s]) - num_dropped);
      std::vector<int32_t> next(more[s].begin() + 1, more[s].begin() + count);
      next.push_back(id_at(s, first_[s]));
      GroupPass& rows = add(draft, s, next, first_[s]);
      int64_t& target_row = target_rows[s % target.size()];
      for (int64_t i = 0; i < count; ++i) rows.feature_rows.push_back(target_row + i);
      rows.want_logits(s, std::ssize(rows.ids) - 1);
      target_row += std::ssize(more[s]);
      first_[s] += count;
    }
    keep(draft, false);
    for (int64_t i = 0; i < 2; ++i) {
      Passes chained = new_passes();
      for (size_t g = 0; g < chained.size(); ++g)
        for (size_t row = 0; row < draft[g].owners.size(); ++row) {
          const size_t s = draft[g].owners[row];
          GroupPass& rows = add(chained, s, {id_at(s, first_[s] + i + 1)}, first_[s] + i);
          rows.feature_rows.push_back(i == 0 ? draft[g].logit_rows[row] : static_cast<int64_t>(row));
          rows.want_logits(s, static_cast<int64_t>(row));
        }
      keep(chained, true);
    }
  }

  GroupPass& add(Passes& pass, size_t s, const std::vector<int32_t>& ids, int64_t first_position) const {
    return pass[s % pass.size()].add(pages_[s], ids, first_position);
  }
  GroupPass& add_with_logits(Passes& pass, size_t s, const std::vector<int32_t>& ids,
                             int64_t first_position) const {
    GroupPass& rows = add(pass, s, ids, first_position);
    for (int64_t row = std::ssize(rows.ids) - std::ssize(ids); row < std::ssize(rows.ids); ++row)
      rows.want_logits(s, row);
    return rows;
  }

  void execute(const Passes& pass, BatchModel model, bool chains) {
    std::vector<Batch> batches;
    for (const GroupPass& rows : pass) batches.push_back(rows.batch(model, chains));
    const Status status = ranks_->execute_step(batches);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  void take_logits(const Passes& pass, int64_t vocab_size) {
    for (const size_t place : by_sequence(pass)) {
      const float* first = ranks_->logits() + static_cast<int64_t>(place) * vocab_size;
      drafts_.logits.emplace_back(first, first + vocab_size);
    }
  }
  void take_ids(std::span<int32_t> ids) {
    const Status status = ranks_->take_draft_ids(first_id_, ids);
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  // Runs a pass of the draft model and checks that each chosen id is the one with the largest logit.
  void keep(const Passes& pass, bool chains) {
    first_id_ = ranks_->begin_drafts();
    execute(pass, BatchModel::kDraft, chains);
    const std::vector<size_t> places = by_sequence(pass);
    std::vector<int32_t> ids(places.size());
    const size_t first = drafts_.logits.size();
    take_logits(pass, ranks_->draft_shape().vocab_size);
    take_ids(ids);
    for (size_t i = 0; i < places.size(); ++i) {
      drafts_.ids.push_back(ids[places[i]]);
      EXPECT_EQ(drafts_.ids.back(),
                target_id(best(drafts_.logits[first + i]), ranks_->draft_token_ids(), config_.vocab_size));
    }
  }

  // Sets the drafts of pass i: unknown ones if they stay.
  void keep_ids(const Passes& pass, int32_t i, bool stay) {
    drafts_.ids.resize(static_cast<size_t>(3 * (i + 1)));
    if (!stay) take_ids(drafts_.ids);
    const std::vector<size_t> places = by_sequence(pass);
    for (size_t s = 0; s < 3; ++s) {
      const int32_t row = 3 * i + static_cast<int32_t>(places[s]);
      drafts_of_[s] = stay ? ~(first_id_ + row) : drafts_.ids[static_cast<size_t>(row)];
    }
  }

  ModelConfig config_;
  std::unique_ptr<RankGroup> ranks_;
  int32_t first_id_ = 0, drafts_of_[3] = {};  // the last drafts
  std::vector<int32_t> pages_[3];
  int64_t first_[3] = {};  // position of each sequence's next token
  Drafts drafts_;
};

}  // namespace fp4moe
