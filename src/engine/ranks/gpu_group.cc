#include "engine/ranks/gpu_group.h"

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/job.h"
#include "device/peer_heap.h"
#include "engine/ranks/gpu_rank.h"
#include "engine/ranks/rank_config.h"
#include "engine/ranks/rank_threads.h"
#include "engine/ranks/summed_progress.h"

namespace fp4moe {
namespace {

constexpr int32_t kDraftSpan = 1 << 22;  // between the numbers that begin_drafts() returns in turn

// Large because it implements RankGroup.
class GpuGroup final : public RankGroup {
 public:
  explicit GpuGroup(const RankSetup& setup)
      : layout_(setup.plan.moe.problem().layout),
        draft_shape_(fp4moe::draft_shape(setup.plan, setup.options)),
        accepts_drafts_(setup.options.accepts_drafts && setup.options.num_slots == 0),
        flags_(setup.flags),
        form_(setup.form),
        staged_bytes_(setup.others == nullptr ? 0 : setup.memory.heap_bytes),
        first_rank_(setup.others == nullptr ? 0 : setup.others->nccl.rank()),
        threads_(setup.others == nullptr ? layout_.tp : 1),
        groups_(static_cast<size_t>(layout_.dp)) {
    const int count = setup.others == nullptr ? layout_.tp : 1;
    for (int i = 0; i < count; ++i) ranks_.push_back(std::make_unique<GpuRank>(setup, first_rank_ + i));
  }

  Status load(const RankSetup& setup);

  const ModelConfig& config() const override { return leader().config(); }
  int num_groups() const override { return layout_.dp; }
  int64_t num_kv_pages() const override { return leader().kv().num_pages(); }
  int64_t num_window_pages() const override { return leader().kv().num_pages(KvLayers::kWindow); }
  int page_size() const override { return leader().kv().page_size(); }
  int64_t num_slots() const override { return leader().kv().state_cache().num_slots(); }
  int64_t kv_token_bytes() const override { return leader().page_token_bytes(KvLayers::kFull); }
  int64_t window_token_bytes() const override { return leader().page_token_bytes(KvLayers::kWindow); }
  ThreadPool& pool() override { return ranks_[0]->rank().pool(); }
  float* logits() override { return layout_.dp == 1 ? ranks_[0]->logits() : logits_.data(); }
  Status supports_routed_experts() const override { return {}; }
  bool samples() const override { return true; }

  DraftShape draft_shape() const override { return draft_shape_; }
  std::span<const int32_t> draft_token_ids() const override { return leader().draft_token_ids(); }

  Status execute_step(std::span<const Batch> groups) override;
  Status take_draft_ids(int32_t first, std::span<int32_t> ids) override;
  bool keeps_draft_ids() const override { return true; }
  int32_t begin_drafts() override;
  int64_t num_cheap_draft_rows() const override { return ranks_[0]->most_widened_rows(); }
  Status set_masked_ids(std::span<const int32_t> ids) override {
    return on_all([&](int r) { return ranks_[rank_index(r)]->set_masked_ids(ids); });
  }
  // The ranks of a group have the same logits, bit for bit, and choose the same tokens.
  Status start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                      std::span<const uint32_t> allowed, std::span<const int32_t> logprob_ids) override;
  bool accepts_drafts() const override { return accepts_drafts_; }
  Status accept_drafts() override {
    return on_all([&](int r) { return ranks_[rank_index(r)]->accept_drafts(); });
  }
  Status take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs) override;
  Status finish_steps() override {
    return on_all([&](int r) { return ranks_[rank_index(r)]->finish_steps(); });
  }
  Status finish_steps_before_last() override {
    return on_all([&](int r) { return ranks_[rank_index(r)]->finish_steps_before_last(); });
  }
  // If a rank's wait has timed out, the other ranks' steps end too, but with wrong results.
  Status failure() const override {
    std::vector<Status> failures;
    for (const auto& rank : ranks_) {
      failures.push_back(rank->failure());
      if (failures.back().ok()) failures.back() = rank->group_failure();
    }
    return ranks_.size() == 1 ? failures[0] : cause_of(failures);
  }
  Status read_page(int group, PageId page, int64_t num_tokens, uint8_t* canonical) override {
    const PageRead pages[] = {{page, num_tokens, {canonical, page_bytes(page, num_tokens)}}};
    return read_pages(group, pages);
  }
  Status write_page(int group, PageId page, int64_t num_tokens, const uint8_t* canonical) override {
    const PageWrite pages[] = {{page, num_tokens, {canonical, page_bytes(page, num_tokens)}}};
    return write_pages(group, pages);
  }
  Status read_pages(int group, std::span<const PageRead> pages) override {
    return pages_of(group).read_pages(pages);
  }
  Status write_pages(int group, std::span<const PageWrite> pages) override {
    return pages_of(group).write_pages(pages);
  }
  int64_t page_batch_bytes() const override { return kPageBatchBytes; }
  Status read_state(int group, int32_t slot, int64_t first, std::span<uint8_t> canonical) override {
    return pages_of(group).read_state(slot, first, canonical);
  }
  Status write_state(int group, int32_t slot, int64_t first, std::span<const uint8_t> canonical) override {
    return pages_of(group).write_state(slot, first, canonical);
  }
  Status copy_states(int group, std::span<const StateCopy> copies) override {
    return on_all([&](int r) {
      const bool is_of_group = r / layout_.attention_tp() == group;
      return is_of_group ? ranks_[rank_index(r)]->copy_states(copies) : Status();
    });
  }

  Status follow() override { return internal_error("ranks on GPUs have no leader to follow"); }
  void abort() override {}
  const Job* job() const override { return nullptr; }
  int64_t weight_bytes() const override {
    int64_t sum = 0;
    for (const auto& rank : ranks_) sum += rank->rank().weight_bytes();
    return sum;
  }
  int64_t kv_bytes() const override {
    int64_t sum = 0;
    for (const auto& rank : ranks_) sum += rank->rank().kv_bytes();
    return sum;
  }
  DraftBytes draft_bytes() const override {
    DraftBytes sum;
    for (const auto& rank : ranks_) {
      const DraftBytes bytes = rank->rank().draft_bytes();
      sum = {sum.weights + bytes.weights, sum.kv + bytes.kv};
    }
    return sum;
  }
  int64_t comm_bytes() const override {
    return heap_ ? heap_->num_ranks() * heap_->num_bytes() : staged_bytes_;
  }
  ExpertLoad expert_load() const override {
    if (ranks_.size() == 1) return sum_expert_load(std::array{&leader().model()}, layout_.dp);
    std::vector<const Model*> models;
    for (const auto& rank : ranks_) models.push_back(&std::as_const(*rank).rank().model());
    return sum_expert_load(models, layout_.tp);
  }

 protected:
  Status reload_ranks(const std::string& folder) override;
  Result<ExpertMoves> move_experts() override;

 private:
  // One group's part of a step.
  struct Group {
    Batch batch;                     // its unknown ids are known_to_rank()
    std::vector<int32_t> token_ids;  // of `batch`
    int64_t num_logit_rows = 0;      // of the last step
    int64_t first_chosen = 0;        // index of its first row in the last start_sample()
    std::vector<SampleRowParams> params;
    // All rows of a pass of the draft model, and the indices of the wanted ones among its logits' rows.
    std::vector<int64_t> all_rows, draft_rows;
    int64_t num_wanted = 0, num_kept = 0;  // ids of drafts since begin_drafts(), and those that ranks kept
    std::vector<LogitEdit> edits;          // of start_sample(), if some have unknown ids
    std::vector<RowsMove> moves;           // of `batch`, by the group's rows
  };
  // A wanted draft: which of the ids that its group's ranks kept it is, counted over both halves.
  struct Draft {
    size_t group = 0;
    int64_t row = 0;
  };
  struct SampledCounts {  // of a group, in one start_sample()
    size_t rows = 0, ids = 0;
  };
  size_t leader_of(int group) const { return rank_index(group * layout_.attention_tp()); }
  Group& group_of(int rank) { return groups_[static_cast<size_t>(rank / layout_.attention_tp())]; }
  GroupPages& pages_of(int group) { return *pages_[static_cast<size_t>(group)]; }
  size_t page_bytes(PageId page, int64_t num_tokens) const {
    return static_cast<size_t>(num_tokens * leader().page_token_bytes(page.layers));
  }
  void take_batches(std::span<const Batch> batches);
  std::span<const Draft> drafts(int32_t first, size_t count) const;
  int32_t known_to_rank(int32_t id, const Group& group) const;
  std::span<const LogitEdit> known_to_rank(std::span<const LogitEdit> edits, Group& group) const;
  void take_draft_rows(Group& group);
  void gather_logits();
  void gather_draft_logits();
  void keep_draft_rows();

  const Rank& leader() const { return std::as_const(*ranks_[0]).rank(); }
  size_t rank_index(int rank) const { return static_cast<size_t>(rank - first_rank_); }
  bool is_here(int rank) const { return rank >= first_rank_ && rank_index(rank) < ranks_.size(); }
  // Calls function(rank) -> Status on every rank's thread.
  template <class Function>
  Status on_all(const Function& function);

  std::unique_ptr<PeerHeap> heap_;  // null with one rank
  std::unique_ptr<Job> movers_;     // connects the ranks' threads; null unless several ranks place experts
  std::vector<std::unique_ptr<GpuRank>> ranks_;
  std::vector<std::unique_ptr<GroupPages>> pages_;  // [dp]; none if there are other processes
  const RankLayout layout_;
  const DraftShape draft_shape_;
  const bool accepts_drafts_;
  const EngineConfig flags_;
  const std::shared_ptr<const CheckpointForm> form_;
  const int64_t staged_bytes_;  // for exchanges with other processes
  const int first_rank_;  // of ranks_, which are all ranks, or one rank if the others are in other processes
  RankThreads threads_;
  std::vector<Group> groups_;
  std::deque<std::vector<SampledCounts>> sampled_;  // [dp], for each start_sample() not yet taken
  std::vector<Draft> drafts_[2];                    // since each of the last two calls of begin_drafts()
  size_t half_ = 0;                                 // of the last call
  std::vector<float> logits_;                       // used with several groups
};

template <class Function>
Status GpuGroup::on_all(const Function& function) {
  return ranks_.size() == 1 ? function(first_rank_) : threads_.run(function);
}

Status GpuGroup::load(const RankSetup& setup) {
  const auto num_ranks = static_cast<int>(ranks_.size());
  if (num_ranks > 1) {
    std::vector<int> gpus;
    for (int r = 0; r < num_ranks; ++r) gpus.push_back(gpu_of_rank(r));
    FP4MOE_ASSIGN_OR_RETURN(heap_, PeerHeap::make(gpus, setup.memory.heap_bytes));
  }
  if (num_ranks > 1 && setup.plan.moe.places_experts()) {
    FP4MOE_ASSIGN_OR_RETURN(movers_, connect_movers(ranks_, setup, *heap_));
  }
  SummedProgress progress(setup.flags.progress_sink, ranks_.size());
  FP4MOE_RETURN_IF_ERROR(on_all(
      [&](int r) { return ranks_[rank_index(r)]->load(setup, heap_.get(), progress.of(rank_index(r))); }));
  FP4MOE_RETURN_IF_ERROR(on_all([&](int r) { return ranks_[rank_index(r)]->rehearse(); }));
  if (setup.others == nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(pages_, make_group_pages(ranks_));
  } else {
    FP4MOE_RETURN_IF_ERROR(setup.others->meet());
  }
  FP4MOE_RETURN_IF_ERROR(on_all([&](int r) { return ranks_[rank_index(r)]->record_graphs(setup.flags); }));
  if (setup.others != nullptr) FP4MOE_RETURN_IF_ERROR(setup.others->meet());
  return failure();
}

Status GpuGroup::reload_ranks(const std::string& folder) {
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, form_->open_same(folder));
  FP4MOE_RETURN_IF_ERROR(on_all([&](int r) { return ranks_[rank_index(r)]->check_weights(checkpoint); }));
  SummedProgress progress(flags_.progress_sink, ranks_.size());
  FP4MOE_RETURN_IF_ERROR(on_all(
      [&](int r) { return ranks_[rank_index(r)]->replace_weights(checkpoint, progress.of(rank_index(r))); }));
  return on_all([&](int r) { return ranks_[rank_index(r)]->replace_graphs(flags_); });
}

Result<ExpertMoves> GpuGroup::move_experts() {
  FP4MOE_RETURN_IF_ERROR(failure());
  FP4MOE_RETURN_IF_ERROR(finish_steps());
  FP4MOE_RETURN_IF_ERROR(on_all([&](int r) {
    const Status status = ranks_[rank_index(r)]->rebalance_experts();
    if (!status.ok() && movers_ != nullptr)
      movers_->endpoint(r).fail(status.with_context("rank " + std::to_string(r)));
    return status;
  }));
  return leader().last_moves();
}

// Returns what the group's ranks take for an id: one that is known, or the place of one that is not among
// those of their rows.
int32_t GpuGroup::known_to_rank(int32_t id, const Group& group) const {
  if (id >= 0) return id;
  const int32_t row = ~id;
  if (row < kFirstDraft) return ~(row - static_cast<int32_t>(group.first_chosen));
  const Draft& draft = drafts(row, 1)[0];
  FP4MOE_CHECK(&groups_[draft.group] == &group, "a draft of another group");
  return ranks_[0]->kept_draft(draft.row);
}

// Returns the wanted drafts from number `first` on.
std::span<const GpuGroup::Draft> GpuGroup::drafts(int32_t first, size_t count) const {
  const std::vector<Draft>& all = drafts_[(first - kFirstDraft) / kDraftSpan];
  const auto begin = static_cast<size_t>((first - kFirstDraft) % kDraftSpan);
  FP4MOE_CHECK(begin + count <= all.size(), std::to_string(count) + " drafts from " + std::to_string(begin) +
                                                " on of " + std::to_string(all.size()));
  return std::span(all).subspan(begin, count);
}

int32_t GpuGroup::begin_drafts() {
  half_ ^= 1;
  drafts_[half_].clear();
  for (Group& group : groups_) group.num_wanted = group.num_kept = 0;
  return kFirstDraft + static_cast<int32_t>(half_) * kDraftSpan;
}

std::span<const LogitEdit> GpuGroup::known_to_rank(std::span<const LogitEdit> edits, Group& group) const {
  if (std::ranges::none_of(edits, [](const LogitEdit& edit) { return edit.token_id < 0; })) return edits;
  group.edits.assign(edits.begin(), edits.end());
  for (LogitEdit& edit : group.edits) edit.token_id = known_to_rank(edit.token_id, group);
  return group.edits;
}

// Copies the batches, with unknown ids as their ranks take them.
void GpuGroup::take_batches(std::span<const Batch> batches) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    group.batch = batches[g];
    group.num_logit_rows = std::ssize(batches[g].logit_rows);
    if (group.batch.model == BatchModel::kDraft) take_draft_rows(group);
    group.moves.assign(batches[g].moves.begin(), batches[g].moves.end());
    for (RowsMove& move : group.moves)
      if (move.row >= 0) move.row -= static_cast<int32_t>(group.first_chosen);
    group.batch.moves = group.moves;
    if (std::ranges::none_of(batches[g].token_ids, [](int32_t id) { return id < 0; })) continue;
    group.token_ids.assign(batches[g].token_ids.begin(), batches[g].token_ids.end());
    for (int32_t& id : group.token_ids) id = known_to_rank(id, group);
    group.batch.token_ids = group.token_ids;
  }
}

void GpuGroup::take_draft_rows(Group& group) {
  Batch& batch = group.batch;
  group.draft_rows.assign(batch.logit_rows.begin(), batch.logit_rows.end());
  const int64_t num_wanted = group.num_wanted + std::ssize(batch.logit_rows);
  const int64_t num_kept = group.num_kept + std::ssize(batch.token_ids);
  const bool has_room = num_kept - num_wanted <= ranks_[0]->most_drafts() / 3;
  if (!has_room || !ranks_[0]->widens(batch)) {
    std::iota(group.draft_rows.begin(), group.draft_rows.end(), 0);
    return;
  }
  group.all_rows.resize(batch.token_ids.size());
  std::iota(group.all_rows.begin(), group.all_rows.end(), 0);
  batch.logit_rows = group.all_rows;
}

Status GpuGroup::execute_step(std::span<const Batch> batches) {
  FP4MOE_CHECK(batches.size() == groups_.size(),
               std::to_string(batches.size()) + " batches for " + std::to_string(groups_.size()) + " groups");
  FP4MOE_RETURN_IF_ERROR(failure());
  take_batches(batches);
  GpuStep step{.model = batches[0].model, .chains = batches[0].chains};
  for (const Group& group : groups_) {
    const GpuStep own = ranks_[0]->step_of(group.batch);
    step.decodes &= own.decodes;
    step.verifies |= own.verifies;
    step.rows = std::max(step.rows, own.rows);
    step.logit_rows = std::max(step.logit_rows, own.logit_rows);
  }
  const Status status = on_all([&](int r) {
    Batch batch = group_of(r).batch;
    if (r % layout_.attention_tp() != 0) batch.routed_experts = nullptr;  // a group's ranks route alike
    GpuStep own = step;
    own.half = static_cast<int64_t>(half_);
    own.first_draft = group_of(r).num_kept;
    return ranks_[rank_index(r)]->execute_step(batch, own);
  });
  FP4MOE_RETURN_IF_ERROR(status);
  if (step.model == BatchModel::kDraft)
    keep_draft_rows();
  else if (layout_.dp > 1)
    gather_logits();
  return failure();
}

// Keeps the places of the wanted ids and the wanted rows of logits.
void GpuGroup::keep_draft_rows() {
  if (ranks_[0]->wants_logits()) gather_draft_logits();
  const int64_t half_begin = static_cast<int64_t>(half_) * ranks_[0]->most_drafts();
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    for (const int64_t row : group.draft_rows)
      drafts_[half_].push_back({g, half_begin + group.num_kept + row});
    group.num_wanted += std::ssize(group.draft_rows);
    group.num_kept += std::ssize(group.batch.logit_rows);
  }
}

void GpuGroup::gather_draft_logits() {
  const int64_t vocab_size = draft_shape_.vocab_size;
  std::vector<float> wanted;
  for (int g = 0; g < layout_.dp; ++g) {
    const float* const rows = ranks_[leader_of(g)]->logits();
    for (const int64_t row : groups_[static_cast<size_t>(g)].draft_rows)
      wanted.insert(wanted.end(), rows + row * vocab_size, rows + (row + 1) * vocab_size);
  }
  if (layout_.dp > 1)
    logits_ = std::move(wanted);
  else
    std::copy_n(wanted.data(), wanted.size(), ranks_[0]->logits());
}

void GpuGroup::gather_logits() {
  if (!ranks_[0]->wants_logits()) return;
  logits_.clear();
  for (int g = 0; g < layout_.dp; ++g) {
    const float* const rows = ranks_[leader_of(g)]->logits();
    logits_.insert(logits_.end(), rows,
                   rows + groups_[static_cast<size_t>(g)].num_logit_rows * config().vocab_size);
  }
}

// A group's rows, edits, masks and listed ids follow those of the group before.
Status GpuGroup::start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                              std::span<const uint32_t> allowed, std::span<const int32_t> logprob_ids) {
  const bool all_greedy = std::ranges::all_of(rows, is_plain_greedy);
  if (layout_.dp == 1) {
    edits = known_to_rank(edits, groups_[0]);
    return on_all([&](int r) {
      return ranks_[rank_index(r)]->start_sample(rows, edits, allowed, logprob_ids, all_greedy);
    });
  }
  struct Part {
    std::span<const LogitEdit> edits;
    std::span<const uint32_t> allowed;
    std::span<const int32_t> logprob_ids;
  };
  std::vector<Part> parts;
  const size_t mask_words = static_cast<size_t>((config().vocab_size + 31) / 32);
  size_t first_row = 0, first_edit = 0, first_mask = 0, first_id = 0;
  sampled_.emplace_back();
  for (Group& group : groups_) {
    group.first_chosen = static_cast<int64_t>(first_row);
    const auto mine = rows.subspan(first_row, static_cast<size_t>(group.num_logit_rows));
    group.params.assign(mine.begin(), mine.end());
    size_t num_edits = 0, num_masks = 0, num_ids = 0;
    for (SampleRowParams& row : group.params) {
      num_edits += static_cast<size_t>(row.num_edits);
      row.first_edit -= row.num_edits > 0 ? static_cast<int32_t>(first_edit) : row.first_edit;
      num_masks += row.allowed >= 0;
      if (row.allowed >= 0) row.allowed -= static_cast<int32_t>(first_mask);
      num_ids += static_cast<size_t>(row.num_logprob_ids);
      row.first_logprob_id -= static_cast<int32_t>(first_id);
    }
    parts.push_back({known_to_rank(edits.subspan(first_edit, num_edits), group),
                     allowed.subspan(first_mask * mask_words, num_masks * mask_words),
                     logprob_ids.subspan(first_id, num_ids)});
    sampled_.back().push_back({mine.size(), num_ids});
    first_row += mine.size(), first_edit += num_edits, first_mask += num_masks, first_id += num_ids;
  }
  return on_all([&](int r) {
    const Part& part = parts[static_cast<size_t>(r / layout_.attention_tp())];
    return ranks_[rank_index(r)]->start_sample(group_of(r).params, part.edits, part.allowed, part.logprob_ids,
                                               all_greedy);
  });
}

Status GpuGroup::take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs) {
  std::vector<SampledCounts> counts = {{out.size(), id_logprobs.size()}};
  if (layout_.dp > 1) {
    FP4MOE_CHECK(!sampled_.empty(), "no rows were sampled");
    counts = std::move(sampled_.front());
    sampled_.pop_front();
  }
  std::vector<SampledRow> others;  // samples of a group's other ranks, equal to those of its first
  std::vector<float> other_logprobs;
  size_t first_row = 0, first_id = 0;
  for (int g = 0; g < layout_.dp; ++g) {
    const auto [num_rows, num_ids] = counts[static_cast<size_t>(g)];
    others.resize(num_rows);
    other_logprobs.resize(num_ids);
    for (int r = 0; r < layout_.attention_tp(); ++r)
      if (const int rank = g * layout_.attention_tp() + r; is_here(rank))
        FP4MOE_RETURN_IF_ERROR(ranks_[rank_index(rank)]->take_sampled(
            r == 0 ? out.subspan(first_row, num_rows) : std::span(others),
            r == 0 ? id_logprobs.subspan(first_id, num_ids) : std::span(other_logprobs)));
    first_row += num_rows, first_id += num_ids;
  }
  return failure();
}

// The ranks of a group choose alike.
Status GpuGroup::take_draft_ids(int32_t first, std::span<int32_t> ids) {
  const std::span<const Draft> wanted = drafts(first, ids.size());
  FP4MOE_RETURN_IF_ERROR(on_all([&](int r) {
    const auto group = static_cast<size_t>(r / layout_.attention_tp());
    std::vector<int64_t> rows;
    for (const Draft& draft : wanted)
      if (draft.group == group) rows.push_back(draft.row);
    std::vector<int32_t> own(rows.size());
    const Status taken = ranks_[rank_index(r)]->take_draft_ids(rows, own);
    if (r % layout_.attention_tp() == 0)
      for (size_t i = 0, next = 0; i < ids.size(); ++i)
        if (wanted[i].group == group) ids[i] = own[next++];
    return taken;
  }));
  return failure();
}

}  // namespace

Result<std::unique_ptr<RankGroup>> make_gpu_group(const RankSetup& setup) {
  auto group = std::make_unique<GpuGroup>(setup);
  const Status loaded = group->load(setup);
  if (loaded.code() == StatusCode::kDoesNotFit)
    return does_not_fit(loaded.message() + "; --mem-fraction-static below " +
                        std::to_string(setup.flags.mem_fraction_static).substr(0, 4) +
                        " leaves more GPU memory for other processes and unplanned allocations");
  FP4MOE_RETURN_IF_ERROR(loaded);
  return std::unique_ptr<RankGroup>(std::move(group));
}

}  // namespace fp4moe
