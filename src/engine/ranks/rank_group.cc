#include "engine/ranks/rank_group.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/guarded.h"
#include "engine/ranks/gpu_group.h"
#include "engine/ranks/rank.h"
#include "engine/ranks/rank_config.h"
#include "engine/ranks/step_runner.h"
#include "engine/ranks/summed_progress.h"

namespace fp4moe {
namespace {

// For the target or the draft model, whichever has the larger vocabulary.
Result<Buffer> make_logits(const RankSetup& setup) {
  const int64_t vocab_size =
      std::max(setup.config.vocab_size, draft_shape(setup.plan, setup.options).vocab_size);
  return Buffer::make(setup.options.max_logit_rows * vocab_size * int64_t{sizeof(float)});
}

// One rank without a job: a step is a function call.
class SingleCpuGroup final : public SingleRankGroup {
 public:
  using SingleRankGroup::SingleRankGroup;

  Status load(const RankSetup& setup) {
    progress_ = setup.flags.progress_sink;
    FP4MOE_RETURN_IF_ERROR(rank_.load(setup, progress_));
    FP4MOE_ASSIGN_OR_RETURN(logits_, make_logits(setup));
    return {};
  }

  Status execute_step(std::span<const Batch> groups) override {
    FP4MOE_CHECK(groups.size() == 1, std::to_string(groups.size()) + " groups, but only 1 rank");
    return rank_.forward_on_rank(groups[0], logits());
  }
  float* logits() override { return logits_.as<float>(); }
  Status supports_routed_experts() const override { return {}; }
  Status failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 protected:
  Status reload_ranks(const std::string& folder) override {
    Status refused;
    const Status status = rank_.reload(folder, progress_, refused);
    if (status.ok()) return refused;
    std::lock_guard lock(mutex_);
    return failure_ = status.with_context("rank 0");
  }
  Result<ExpertMoves> move_experts() override {
    FP4MOE_RETURN_IF_ERROR(rank_.forward_on_rank({.moves_experts = true}, nullptr));
    return rank_.last_moves();
  }

 private:
  Buffer logits_;  // [max_logit_rows, V] f32, of either model
  ProgressSink progress_;
  mutable std::mutex mutex_;
  Status failure_;  // of reload_ranks()
};

// This process's ranks in a job of several ranks.
// Large because it implements RankGroup.
class MultiRankGroup final : public RankGroup {
 public:
  explicit MultiRankGroup(std::unique_ptr<Job> job) : job_(std::move(job)) {}
  ~MultiRankGroup() override {
    const bool failed = runner_ != nullptr && !runner_->failure().ok();
    if (failed && job_->num_processes() > 1) {
      if (job_->process() != 0) std::this_thread::sleep_for(kAbortGrace);
      abort();
    }
    runner_.reset();
  }

  Status start(const RankSetup& setup, const StepLimits& limits) {
    config_ = setup.config;
    draft_shape_ = fp4moe::draft_shape(setup.plan, setup.options);
    heap_bytes_ = setup.memory.heap_bytes;
    layout_ = setup.plan.moe.problem().layout;
    if (job_->process() == 0) {
      FP4MOE_ASSIGN_OR_RETURN(logits_, make_logits(setup));
    }
    FP4MOE_RETURN_IF_ERROR(load(setup));
    const StepRunnerOptions options{.layout = layout_,
                                    .limits = limits,
                                    .region = setup.memory.step,
                                    .timeout = comm_timeout(setup.flags)};
    progress_sink_ = setup.flags.progress_sink;
    runner_ = std::make_unique<StepRunner>(
        *job_, options,
        [this](int rank, const Batch& batch, float* logits) {
          return local_rank(rank).forward_on_rank(batch, logits);
        },
        [this](int rank, const std::string& folder) { return reload_rank(rank, folder); });
    return job_->process() == 0 ? runner_->start() : Status();
  }

  const ModelConfig& config() const override { return config_; }
  int num_groups() const override { return layout_.dp; }
  int64_t num_kv_pages() const override { return ranks_[0]->kv().num_pages(); }
  int64_t num_window_pages() const override { return ranks_[0]->kv().num_pages(KvLayers::kWindow); }
  int page_size() const override { return ranks_[0]->kv().page_size(); }
  int64_t num_slots() const override { return ranks_[0]->kv().state_cache().num_slots(); }
  // Ranks of this process only: disaggregation with ranks in several processes is refused before loading.
  int64_t kv_token_bytes() const override { return ranks_[0]->page_token_bytes(KvLayers::kFull); }
  int64_t window_token_bytes() const override { return ranks_[0]->page_token_bytes(KvLayers::kWindow); }
  Status read_page(int group, PageId page, int64_t num_tokens, uint8_t* canonical) override {
    for (const auto& rank : ranks_of(group)) rank->read_page(page, num_tokens, canonical);
    return {};
  }
  Status write_page(int group, PageId page, int64_t num_tokens, const uint8_t* canonical) override {
    for (const auto& rank : ranks_of(group)) rank->write_page(page, num_tokens, canonical);
    return {};
  }
  Status read_state(int group, int32_t slot, int64_t first, std::span<uint8_t> canonical) override {
    for (const auto& rank : ranks_of(group)) rank->states().read_slot(slot, first, canonical);
    return {};
  }
  Status write_state(int group, int32_t slot, int64_t first, std::span<const uint8_t> canonical) override {
    for (const auto& rank : ranks_of(group)) rank->states().write_slot(slot, first, canonical);
    return {};
  }
  Status copy_states(int group, std::span<const StateCopy> copies) override {
    for (const auto& rank : ranks_of(group)) rank->states().copy_slots(copies);
    return {};
  }
  Status execute_step(std::span<const Batch> groups) override {
    return runner_->run_on_ranks(groups, logits());
  }
  float* logits() override { return logits_.as<float>(); }
  Status supports_routed_experts() const override {
    if (job_->num_processes() == 1) return {};
    return unsupported("ranks in other processes (--fabric mpi) do not report routed experts");
  }
  Status failure() const override { return runner_->failure(); }
  ThreadPool& pool() override { return ranks_[0]->pool(); }

  Status follow() override { return runner_->follow(); }
  void abort() override { job_->abort(runner_->failure()); }
  const Job* job() const override { return job_.get(); }
  int64_t weight_bytes() const override {
    int64_t sum = 0;
    for (const auto& rank : ranks_) sum += rank->weight_bytes();
    return sum;
  }
  int64_t kv_bytes() const override {
    int64_t sum = 0;
    for (const auto& rank : ranks_) sum += rank->kv_bytes();
    return sum;
  }
  DraftShape draft_shape() const override { return draft_shape_; }
  std::span<const int32_t> draft_token_ids() const override { return ranks_[0]->draft_token_ids(); }
  DraftBytes draft_bytes() const override {
    DraftBytes sum;
    for (const auto& rank : ranks_)
      sum = {sum.weights + rank->draft_bytes().weights, sum.kv + rank->draft_bytes().kv};
    return sum;
  }
  int64_t comm_bytes() const override { return heap_bytes_ * job_->num_local_ranks(); }
  ExpertLoad expert_load() const override {
    std::vector<const Model*> models;
    for (const auto& rank : ranks_) models.push_back(&rank->model());
    return sum_expert_load(models, layout_.tp);
  }

 protected:
  Status reload_ranks(const std::string& folder) override {
    reload_progress_.emplace(progress_sink_, ranks_.size());
    FP4MOE_RETURN_IF_ERROR(runner_->run_task(folder));
    return std::exchange(refused_, {});
  }
  Result<ExpertMoves> move_experts() override {
    const std::vector<Batch> groups(static_cast<size_t>(layout_.dp), Batch{.moves_experts = true});
    FP4MOE_RETURN_IF_ERROR(runner_->run_on_ranks(groups, logits()));
    return ranks_[0]->last_moves();
  }

 private:
  Status load(const RankSetup& setup);
  Rank& local_rank(int rank) { return *ranks_[static_cast<size_t>(rank - job_->first_rank())]; }
  // Only rank 0 has progress and reports a refusal; it is the same on all ranks.
  Status reload_rank(int rank, const std::string& folder) {
    Status refused;
    const bool reports = job_->process() == 0;
    const Status status = local_rank(rank).reload(
        folder, reports ? reload_progress_->of(static_cast<size_t>(rank)) : ProgressSink(), refused);
    if (rank == 0) refused_ = refused;
    return status;
  }
  std::span<const std::unique_ptr<Rank>> ranks_of(int group) const {
    const auto size = static_cast<size_t>(layout_.attention_tp());
    return std::span(ranks_).subspan(static_cast<size_t>(group) * size, size);
  }

  std::unique_ptr<Job> job_;
  ModelConfig config_;
  DraftShape draft_shape_;
  RankLayout layout_;
  int64_t heap_bytes_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Buffer logits_;  // process 0: as in SingleCpuGroup
  ProgressSink progress_sink_;
  std::optional<SummedProgress> reload_progress_;  // process 0
  Status refused_;                                 // by the last reload
  std::unique_ptr<StepRunner> runner_;             // last: its threads use the members above
};

// Loads all ranks in parallel, each on its own thread. A rank that fails ends the job.
Status MultiRankGroup::load(const RankSetup& setup) {
  const int first = job_->first_rank(), count = job_->num_local_ranks();
  SummedProgress progress(setup.flags.progress_sink, static_cast<size_t>(count));
  for (int rank = first; rank < first + count; ++rank)
    ranks_.push_back(std::make_unique<Rank>(setup, rank, &job_->endpoint(rank)));
  const auto load_rank = [&](int i) {
    const Status status = guarded(
        [&] {
          const auto local = static_cast<size_t>(i);
          return ranks_[local]
              ->load(setup, progress.of(local))
              .with_context("rank " + std::to_string(first + i));
        },
        StatusCode::kDoesNotFit);
    if (!status.ok()) job_->endpoint(first + i).fail(status);
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(count));
  const auto start = [&]() -> Status {
    for (int i = 0; i < count; ++i) threads.emplace_back(load_rank, i);
    return {};
  };
  const Status started = guarded(start, StatusCode::kDoesNotFit);
  if (!started.ok())  // ranks already started see the job's failure
    job_->endpoint(first).fail(no_thread_for(first + static_cast<int>(threads.size()), started));
  for (std::thread& thread : threads) thread.join();
  return job_->endpoint(first).failure();
}

Result<std::unique_ptr<RankGroup>> make_group(RankSetup setup, const StepLimits& limits) {
  const ModelPlan& plan = setup.plan;
  const EngineConfig& flags = setup.flags;
  const RankLayout& layout = plan.moe.problem().layout;
  if (plan.device() == DeviceKind::kCuda) {
    if (local_ranks(plan) < layout.tp) return make_gpu_processes(setup, limits);
    setup.num_threads = std::max(1, setup.num_threads / layout.tp);
    return make_gpu_group(setup);
  }
  if (layout.tp == 1) {
    auto single = std::make_unique<SingleCpuGroup>(setup);
    FP4MOE_RETURN_IF_ERROR(single->load(setup));
    return std::unique_ptr<RankGroup>(std::move(single));
  }
  const JobOptions job_options{
      .fabric = plan.moe.fabric().name,
      .num_ranks = layout.tp,
      .heap_bytes = setup.memory.heap_bytes,
      .timeout_seconds = flags.comm_timeout,
      .config_text =
          rank_config_text(setup.checkpoint, setup.config, plan, flags, setup.options, setup.draft),
  };
  FP4MOE_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::open(job_options));
  setup.num_threads = std::max(1, setup.num_threads / job->num_local_ranks());
  auto ranks = std::make_unique<MultiRankGroup>(std::move(job));
  FP4MOE_RETURN_IF_ERROR(ranks->start(setup, limits));
  return std::unique_ptr<RankGroup>(std::move(ranks));
}

// Returns why ranks on GPUs do not reload weights; empty if they do.
std::string no_reload_on_gpus(const ModelPlan& plan) {
  const bool has_processes = local_ranks(plan) < plan.moe.problem().layout.tp;
  return has_processes ? "in several processes (--fabric mpi); nearest legal choice: restart the server" : "";
}

}  // namespace

Result<std::unique_ptr<RankGroup>> RankGroup::make(const Checkpoint& checkpoint, const ModelConfig& config,
                                                   const ModelPlan& plan, const EngineConfig& flags,
                                                   const RankGroupOptions& options, const Checkpoint* draft) {
  const StepLimits limits = step_limits(config, plan, flags, options);
  FP4MOE_ASSIGN_OR_RETURN(const CommMemory memory, comm_memory(plan.moe, limits, draft_moe(plan)));
  FP4MOE_ASSIGN_OR_RETURN(CheckpointForm form, CheckpointForm::of(checkpoint));
  const int num_threads = flags.threads > 0 ? flags.threads : available_cores();
  RankSetup setup{checkpoint, config, plan, flags, options, memory, num_threads, draft, nullptr};
  setup.form = std::make_shared<const CheckpointForm>(std::move(form));
  try {
    FP4MOE_ASSIGN_OR_RETURN(std::unique_ptr<RankGroup> group, make_group(setup, limits));
    group->form_ = setup.form;
    group->places_experts_ = plan.moe.places_experts();
    if (plan.device() == DeviceKind::kCuda) group->no_reload_ = no_reload_on_gpus(plan);
    return group;
  } catch (const std::exception& error) {  // no memory or no threads
    return does_not_fit(std::string("the system has no memory or threads for the ranks: ") + error.what());
  }
}

Status RankGroup::check_reload(const std::string& folder) const {
  if (!no_reload_.empty()) return unsupported("weights are not reloaded on GPUs " + no_reload_);
  return form_->open_same(folder).status();
}

Status RankGroup::reload(const std::string& folder) {
  FP4MOE_RETURN_IF_ERROR(check_reload(folder));
  return reload_ranks(folder);
}

}  // namespace fp4moe
