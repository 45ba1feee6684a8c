#include "engine/step/adaptive_drafter.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace fp4moe {

StepCost step_cost(const ModelConfig& config, int64_t weight_bytes) {
  constexpr double kBytesPerWeight = 0.5 + 1.0 / 16;  // FP4 and a scale for 16 weights
  if (config.num_experts == 0)
    return {.dense_bytes = static_cast<double>(std::max<int64_t>(weight_bytes, 1))};
  const auto num_layers = static_cast<double>(config.layer_has_experts.empty()
                                                  ? config.num_layers
                                                  : std::ranges::count(config.layer_has_experts, true));
  const auto num_experts = static_cast<double>(config.num_experts);
  const double expert_bytes = num_layers * 3 * static_cast<double>(config.hidden_size) *
                              static_cast<double>(config.intermediate_size) * kBytesPerWeight;
  const double all_bytes = static_cast<double>(weight_bytes), expert_sum = num_experts * expert_bytes;
  return {.dense_bytes = std::max(all_bytes - expert_sum, all_bytes / 64),
          .expert_bytes = expert_bytes,
          .num_experts = num_experts,
          .top_k = static_cast<double>(config.top_k)};
}

Status AdaptiveDrafter::draft(DpScheduler& scheduler) {
  constexpr double kNewShare = 1.0 / 8;  // of a measured time in its mean
  constexpr int64_t kMeasured = 16;      // calls between two that wait for their drafts
  list(scheduler);
  if (drafter_->runs_model()) choose(/*is_drafted=*/false);
  if (num_unmeasured_ + 1 >= kMeasured || draft_seconds_ == 0) drafter_->wait_in_next_draft();
  const auto started = std::chrono::steady_clock::now();
  FP4MOE_RETURN_IF_ERROR(drafter_->draft(scheduler));
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - started;
  drafting_seconds_ = time.count();
  if (!drafter_->runs_model()) {
    choose(/*is_drafted=*/true);
    return {};
  }
  int64_t depth = 1;
  for (const Sequence* sequence : listed_) depth = std::max(depth, std::ssize(sequence->draft.ids));
  if (!drafter_->has_waited()) {  // the passes are a part of the step
    drafting_seconds_ = std::max(time.count(), draft_seconds_ * static_cast<double>(depth));
    ++num_unmeasured_;
    return {};
  }
  num_unmeasured_ = 0;
  const double seconds = time.count() / static_cast<double>(depth);
  draft_seconds_ = draft_seconds_ == 0 ? seconds : draft_seconds_ + kNewShare * (seconds - draft_seconds_);
  return {};
}

// Lists the sequences that decode in the next step, after counting the drafts of the last one.
void AdaptiveDrafter::list(const DpScheduler& scheduler) {
  listed_.clear();
  scheduler.list(listed_);
  std::erase_if(listed_, [](const Sequence* sequence) {
    return !decodes(*sequence) || sequence->is_over() || sequence->grammar.awaits_mask;
  });
  for (Sequence* sequence : listed_) {
    SequenceDraft& draft = sequence->draft;
    choice_.add_verified(draft.record, std::exchange(draft.num_last_proposed, 0),
                         std::exchange(draft.num_last_correct, 0));
  }
}

void AdaptiveDrafter::choose(bool is_drafted) {
  candidates_.clear();
  for (Sequence* sequence : listed_) {
    SequenceDraft& draft = sequence->draft;
    const int64_t num_left = sequence->max_tokens - sequence->num_tokens() - 1;
    const int64_t most = is_drafted ? std::ssize(draft.ids) : may_draft(*sequence) ? max_drafts_ : 0;
    candidates_.push_back({&draft.record, std::clamp<int64_t>(num_left, 0, most)});
  }
  choice_.choose(candidates_, std::ssize(listed_), is_drafted ? 0 : draft_seconds_);
  for (size_t i = 0; i < listed_.size(); ++i) {
    SequenceDraft& draft = listed_[i]->draft;
    draft.most = candidates_[i].num_drafts;
    if (is_drafted) draft.ids.resize(static_cast<size_t>(draft.most));
  }
}

void AdaptiveDrafter::keep_step(const DpScheduler& scheduler) {
  drafter_->keep_step(scheduler);
  num_sequences_ = num_rows_ = 0;
  bool only_decodes = true;
  for (int group = 0; group < scheduler.num_groups(); ++group)
    for (const ScheduledRows& rows : scheduler.step(group)) {
      only_decodes = only_decodes && rows.num_rows == 1 && decodes(*rows.sequence);
      ++num_sequences_;
      num_rows_ += rows.num_rows + rows.num_drafts;
    }
  if (!only_decodes) num_sequences_ = 0;
}

void AdaptiveDrafter::finish_step(double seconds) {
  drafter_->finish_step(seconds);
  if (num_sequences_ > 0)
    choice_.add_step(std::exchange(num_sequences_, 0), num_rows_, seconds - drafting_seconds_);
}

}  // namespace fp4moe
