// Three sequences that grow together, run by the ranks of a demo checkpoint.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/relative_l2.h"
#include "engine/ranks/rank_group.h"
#include "io/checkpoint/checkpoint.h"
#include "io/file.h"
#include "model/plan_model.h"
#include "model/resolve_flags.h"
#include "moe/table.h"

namespace fp4moe {

inline constexpr RankGroupOptions kOptions{
    .max_batch_tokens = 64, .max_logit_rows = 8, .num_kv_pages = 24, .wants_logits = true};
inline constexpr int64_t kPagesEach = 6;

// If the binary was built on another machine, the working folder is the repository's root.
inline std::string models() { return file_exists(FP4MOE_MODELS) ? FP4MOE_MODELS : "models"; }

using Logits = std::vector<std::vector<float>>;  // [sequences, V]

// Three sequences that grow together, each with its own pages.
class Growing {
 public:
  // model: a demo's name or an absolute path. If `tactic` is given, uses that tactic of the kernels' table
  // wherever it fits.
  Growing(const std::string& model, bool graphs, std::optional<uint8_t> tactic = {},
          const char* device = "cuda") {
    EngineConfig flags;
    flags.device = device;
    flags.disable_cuda_graph = !graphs;
    make(model, flags, tactic);
  }
  // `options` has room for kPagesEach pages of each sequence.
  Growing(const std::string& model, const EngineConfig& flags, const RankGroupOptions& options = kOptions)
      : options_(options) {
    make(model, flags, {});
  }

  // Uses tactic 0 where `tactic` does not fit.
  static DeviceTactics fitting(const MoePlan& plan, uint8_t tactic) {
    const MoeProblem& p = plan.problem();
    DeviceMoeArgs sizes{.experts = {.format = p.format,
                                    .num_experts = p.num_experts,
                                    .hidden_size = p.hidden_size,
                                    .intermediate_size = p.intermediate_size,
                                    .activation = p.activation},
                        .topk = p.top_k};
    DeviceTactics tactics;
    for (sizes.num_tokens = 1; sizes.num_tokens <= kOptions.max_batch_tokens; ++sizes.num_tokens) {
      tactics.buckets.push_back(sizes.num_tokens);
      tactics.chosen.push_back(plan.device_ops().tactics[tactic].fits(sizes) ? tactic : 0);
    }
    return tactics;
  }
  RankGroup& ranks() { return *ranks_; }
  size_t num_tactics() const { return num_tactics_; }
  int64_t vocab_size() const { return config_.vocab_size; }
  const std::vector<int32_t>& tokens(size_t s) const { return tokens_[s]; }
  const ModelConfig& config() const { return config_; }
  bool wants_experts = false;
  const std::vector<int32_t>& experts() const { return experts_; }  // laid out as Batch::routed_experts

  // The contents of all pages in canonical form, sequence by sequence.
  std::vector<std::vector<uint8_t>> pages() {
    std::vector<std::vector<uint8_t>> all;
    each_page([&](size_t s, int32_t page, int64_t num_tokens) {
      all.emplace_back(static_cast<size_t>(num_tokens * ranks_->kv_token_bytes()));
      EXPECT_TRUE(ranks_->read_page(group_of(s), page, num_tokens, all.back().data()).ok());
    });
    return all;
  }
  // The states in canonical form, sequence by sequence; none if the model has none.
  std::vector<std::vector<uint8_t>> states() {
    std::vector<std::vector<uint8_t>> all;
    if (config_.has_state()) all.resize(3, std::vector<uint8_t>(static_cast<size_t>(ranks_->state_bytes())));
    for (size_t s = 0; s < all.size(); ++s)
      EXPECT_TRUE(ranks_->read_state(group_of(s), slot_of(s), 0, all[s]).ok());
    return all;
  }
  // Continues from `other`'s pages and states by copying them instead of computing rows.
  void take_over(Growing& other) {
    for (size_t s = 0; s < 3; ++s) tokens_[s] = other.tokens_[s];
    const auto all = other.pages();
    auto next = all.begin();
    each_page([&](size_t s, int32_t page, int64_t num_tokens) {
      EXPECT_TRUE(ranks_->write_page(group_of(s), page, num_tokens, (next++)->data()).ok());
    });
    const auto states = other.states();
    for (size_t s = 0; s < states.size(); ++s)
      EXPECT_TRUE(ranks_->write_state(group_of(s), slot_of(s), 0, states[s]).ok());
  }

  // Appends the tokens and runs them; experts() then returns this step's experts. Data-parallel group g of n
  // has the sequences g, g + n, ...
  Logits step(const std::vector<std::vector<int32_t>>& more) {
    Logits logits;
    for (Logits& rows : run(more, /*all_logits=*/false)) logits.push_back(std::move(rows.back()));
    return logits;
  }
  // The same with the logits of every row: sequence by sequence, [rows, V]. If the flags allow drafts, the
  // rows after a sequence's first one are drafts.
  std::vector<Logits> verify(const std::vector<std::vector<int32_t>>& more) {
    return run(more, /*all_logits=*/true);
  }
  // Forgets a sequence's last tokens; a later step writes to their places. A model with states
  // forgets only drafts of the last step.
  void drop_last(size_t s, size_t count) {
    tokens_[s].resize(tokens_[s].size() - count);
    num_drafts_[s] -= static_cast<int32_t>(count);
  }

 private:
  struct Rows {  // one group's batch
    std::vector<int32_t> ids;
    std::vector<int64_t> positions, logit_rows;
    std::vector<SequenceRows> sequences;
  };

  std::vector<Logits> run(const std::vector<std::vector<int32_t>>& more, bool all_logits) {
    const auto num_groups = static_cast<size_t>(ranks_->num_groups());
    std::vector<Rows> groups(num_groups);
    std::vector<size_t> order;  // sequence to which each row of logits belongs
    for (size_t g = 0; g < num_groups; ++g)
      for (size_t s = g; s < 3; s += num_groups) {
        append(groups[g], s, more[s], all_logits);
        order.insert(order.end(), all_logits ? more[s].size() : 1, s);
      }
    experts_.assign(groups[0].ids.size() * static_cast<size_t>(config_.num_layers * config_.top_k), -1);
    std::vector<Batch> batches;
    for (const Rows& rows : groups)
      batches.push_back({rows.ids, rows.positions, rows.sequences, rows.logit_rows,
                         wants_experts && batches.empty() ? experts_.data() : nullptr});
    const Status status = ranks_->execute_step(batches);
    EXPECT_TRUE(status.ok()) << status.to_string();
    std::vector<Logits> logits(3);
    for (size_t i = 0; i < order.size(); ++i) {
      const float* row = ranks_->logits() + static_cast<int64_t>(i) * vocab_size();
      logits[order[i]].emplace_back(row, row + vocab_size());
    }
    return logits;
  }

  void append(Rows& rows, size_t s, const std::vector<int32_t>& more, bool all_logits) {
    const auto first_row = std::ssize(rows.ids), first = std::ssize(tokens_[s]);
    for (const int32_t id : more) {
      rows.positions.push_back(std::ssize(tokens_[s]));
      tokens_[s].push_back(id);
      rows.ids.push_back(id);
      if (all_logits || rows.ids.size() == static_cast<size_t>(first_row) + more.size())
        rows.logit_rows.push_back(std::ssize(rows.ids) - 1);
    }
    rows.sequences.push_back({first_row, std::ssize(more), first, pages_[s]});
    if (!config_.has_state()) return;
    rows.sequences.back().slot = slot_of(s);
    rows.sequences.back().num_replayed = num_drafts_[s];
    num_drafts_[s] = all_logits && takes_drafts_ ? static_cast<int32_t>(more.size()) - 1 : 0;
    rows.sequences.back().num_tentative = num_drafts_[s];
  }

  void make(const std::string& model, EngineConfig flags, std::optional<uint8_t> tactic) {
    flags.model_path = model.starts_with('/') ? model : models() + "/" + model;
    config_ = load_model_config(flags.model_path).value();
    Result<ModelPlan> planned = plan_model(config_, flags);
    if (!planned.ok()) throw std::runtime_error(planned.status().to_string());
    ModelPlan plan = std::move(*planned);
    if (tactic) plan.moe = plan.moe.with_tactics(fitting(plan.moe, *tactic));
    const Checkpoint checkpoint = Checkpoint::open(flags.model_path).value();
    if (plan.moe.runner()->device_ops != nullptr) num_tactics_ = plan.moe.device_ops().tactics.size();
    RankGroupOptions options = options_;
    options.max_logit_rows *= rows_per_request(plan.flags);
    options.num_slots = StateCache::slots_for(config_, 3);
    takes_drafts_ = rows_per_request(plan.flags) > 1;
    auto made = RankGroup::make(checkpoint, config_, plan, plan.flags, options);
    if (!made.ok()) throw std::runtime_error(made.status().to_string());
    ranks_ = std::move(*made);
    for (int32_t s = 0; s < 3; ++s)
      for (int32_t i = 0; i < kPagesEach; ++i) pages_[s].push_back(s + 3 * (kPagesEach - 1 - i));
  }

  static int32_t slot_of(size_t s) { return static_cast<int32_t>(s) + 1; }
  int group_of(size_t s) const { return static_cast<int>(s) % ranks_->num_groups(); }

  // Calls function(sequence, page, number of tokens in it) for every page.
  template <class Function>
  void each_page(const Function& function) const {
    const int64_t size = ranks_->page_size();
    for (size_t s = 0; s < 3; ++s)
      for (int64_t first = 0; first < std::ssize(tokens_[s]); first += size)
        function(s, pages_[s][static_cast<size_t>(first / size)],
                 std::min(size, std::ssize(tokens_[s]) - first));
  }

  RankGroupOptions options_ = kOptions;
  ModelConfig config_;
  size_t num_tactics_ = 0;
  std::unique_ptr<RankGroup> ranks_;
  std::vector<int32_t> tokens_[3], pages_[3], experts_;
  bool takes_drafts_ = false;
  int32_t num_drafts_[3] = {};  // right ones of the last step, of a model with states
};

inline int32_t best(const std::vector<float>& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

inline std::vector<std::vector<int32_t>> best_of(const Logits& logits) {
  std::vector<std::vector<int32_t>> next;
  for (const auto& row : logits) next.push_back({best(row)});
  return next;
}

inline const std::vector<std::vector<int32_t>> kPrompts = {
    {5, 17, 300, 42, 7},
    {9, 8, 7, 6, 5, 4, 3, 30, 31},
    {100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110}};

// Relative L2 error of each sequence, ascending. If rounding routes a token to another expert, its sequence
// has a larger error, so tests check the median.
inline std::vector<double> sorted_errors(const Logits& actual, const Logits& expected) {
  std::vector<double> errors;
  for (size_t s = 0; s < expected.size(); ++s) errors.push_back(relative_l2(actual[s], expected[s]));
  std::sort(errors.begin(), errors.end());
  return errors;
}

}  // namespace fp4moe
