#include "engine/ranks/gpu_group.h"

#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "device/peer_heap.h"
#include "engine/ranks/gpu_rank.h"
#include "engine/ranks/rank_threads.h"
#include "engine/ranks/summed_progress.h"

namespace fp4moe {
namespace {

// The status that explains the failure: a rank that fails keeps the others waiting until their deadline.
Status first_cause(const std::vector<Status>& statuses) {
  const Status* cause = nullptr;
  for (const Status& status : statuses)
    if (!status.ok() && (cause == nullptr || cause->code() == StatusCode::kDeadline)) cause = &status;
  return cause == nullptr ? Status() : *cause;
}

// Large because it implements RankGroup.
class GpuGroup final : public RankGroup {
 public:
  explicit GpuGroup(const RankSetup& setup) : threads_(setup.plan.moe.problem().layout.tp) {
    const int num_ranks = setup.plan.moe.problem().layout.tp;
    for (int r = 0; r < num_ranks; ++r) ranks_.push_back(std::make_unique<GpuRank>(setup, r));
  }

  Status load(const RankSetup& setup);

  const ModelConfig& config() const override { return leader().model().config(); }
  int num_groups() const override { return 1; }
  int64_t num_kv_pages() const override { return leader().kv().num_pages(); }
  int page_size() const override { return leader().kv().page_size(); }
  int64_t kv_token_bytes() const override { return leader().kv().token_bytes(); }
  ThreadPool& pool() override { return ranks_[0]->rank().pool(); }
  float* logits() override { return ranks_[0]->logits(); }
  Status supports_routed_experts() const override { return {}; }
  bool samples() const override { return true; }

  Status execute_step(std::span<const Batch> groups) override {
    FP4MOE_CHECK(groups.size() == 1, std::to_string(groups.size()) + " groups, 1 expected");
    Batch others = groups[0];  // all ranks route alike; rank 0 reports
    others.routed_experts = nullptr;
    FP4MOE_RETURN_IF_ERROR(failure());
    const Status status =
        on_all([&](int r) { return ranks_[rank_index(r)]->execute_step(r == 0 ? groups[0] : others); });
    return status.ok() ? failure() : status;
  }
  Status set_masked_ids(std::span<const int32_t> ids) override {
    return on_all([&](int r) { return ranks_[rank_index(r)]->set_masked_ids(ids); });
  }
  // Every rank has the same logits, bit for bit, and chooses the same tokens.
  Status start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                      std::span<const uint32_t> allowed) override {
    return on_all([&](int r) { return ranks_[rank_index(r)]->start_sample(rows, edits, allowed); });
  }
  Status take_sampled(std::span<SampledRow> out) override;
  Status finish_steps() override {
    return on_all([&](int r) { return ranks_[rank_index(r)]->finish_steps(); });
  }
  // If a rank has waited in vain, the others' steps end too, with wrong results.
  Status failure() const override {
    std::vector<Status> statuses;
    for (const auto& rank : ranks_) {
      statuses.push_back(rank->failure());
      statuses.push_back(rank->group_failure());
    }
    return first_cause(statuses);
  }
  Status read_page(int, int32_t page, int64_t num_tokens, uint8_t* canonical) override {
    FP4MOE_CHECK(ranks_.size() == 1, "KV pages of several ranks");
    return ranks_[0]->read_page(page, num_tokens, canonical);
  }
  Status write_page(int, int32_t page, int64_t num_tokens, const uint8_t* canonical) override {
    FP4MOE_CHECK(ranks_.size() == 1, "KV pages of several ranks");
    return ranks_[0]->write_page(page, num_tokens, canonical);
  }

  Status follow() override { return internal_error("ranks on GPUs have no leader to follow"); }
  void abort() override {}
  const Job* job() const override { return nullptr; }
  int64_t weight_bytes() const override {
    int64_t sum = 0;
    for (const auto& rank : ranks_) sum += rank->rank().model().weight_bytes();
    return sum;
  }
  int64_t kv_bytes() const override {
    int64_t sum = 0;
    for (const auto& rank : ranks_) sum += rank->rank().kv().num_bytes();
    return sum;
  }
  int64_t comm_bytes() const override { return heap_ ? heap_->num_ranks() * heap_->num_bytes() : 0; }
  ExpertLoad expert_load() const override {
    const Model* model = &leader().model();  // every rank counts all tokens
    return sum_expert_load({&model, 1}, 1);
  }

 private:
  const Rank& leader() const { return std::as_const(*ranks_[0]).rank(); }
  static size_t rank_index(int rank) { return static_cast<size_t>(rank); }
  // Calls function(rank) -> Status on every rank's thread.
  template <class Function>
  Status on_all(const Function& function);

  std::unique_ptr<PeerHeap> heap_;  // null with one rank
  std::vector<std::unique_ptr<GpuRank>> ranks_;
  RankThreads threads_;
};

template <class Function>
Status GpuGroup::on_all(const Function& function) {
  if (ranks_.size() == 1) return function(0);
  std::vector<Status> statuses(ranks_.size());
  threads_.run([&](int rank) {
    Status status;
    try {
      status = function(rank);
    } catch (const std::bad_alloc&) {
      status = does_not_fit("out of memory");
    } catch (const std::exception& error) {
      status = internal_error(error.what());
    }
    statuses[rank_index(rank)] = status.with_context("rank " + std::to_string(rank));
  });
  return first_cause(statuses);
}

Status GpuGroup::load(const RankSetup& setup) {
  const auto num_ranks = static_cast<int>(ranks_.size());
  if (num_ranks > 1) {
    std::vector<int> gpus;
    for (int r = 0; r < num_ranks; ++r) gpus.push_back(gpu_of_rank(r));
    FP4MOE_ASSIGN_OR_RETURN(heap_, PeerHeap::make(gpus, setup.memory.heap_bytes));
  }
  SummedProgress progress(setup.flags.progress_sink, ranks_.size());
  FP4MOE_RETURN_IF_ERROR(on_all(
      [&](int r) { return ranks_[rank_index(r)]->load(setup, heap_.get(), progress.of(rank_index(r))); }));
  FP4MOE_RETURN_IF_ERROR(on_all([&](int r) { return ranks_[rank_index(r)]->rehearse(); }));
  FP4MOE_RETURN_IF_ERROR(on_all([&](int r) { return ranks_[rank_index(r)]->record_graphs(setup.flags); }));
  return failure();
}

Status GpuGroup::take_sampled(std::span<SampledRow> out) {
  std::vector<SampledRow> others(ranks_.size() == 1 ? 0 : out.size());
  for (size_t r = ranks_.size(); r-- > 0;)
    FP4MOE_RETURN_IF_ERROR(ranks_[r]->take_sampled(r == 0 ? out : std::span(others)));
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
