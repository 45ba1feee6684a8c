// ProcessGroup: the ranks of a model on GPUs of several processes, one rank each. Process 0 is rank 0. It
// sends each call that ranks take part in to the other processes, which repeat it on their rank, and calls
// its own rank. The calls only enqueue work; ranks exchange data on their GPUs (comm/nccl_comm.h), and chosen
// tokens stay there too, except those that the first rank of another data-parallel group sends to process 0.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "comm/job.h"
#include "comm/nccl_comm.h"
#include "engine/ranks/group_command.h"
#include "engine/ranks/message_pipe.h"
#include "engine/ranks/rank_group.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

struct ProcessGroupOptions {
  RankLayout layout;                   // rank: this process's
  StepLimits limits;                   // with num_unknown_ids
  std::chrono::nanoseconds timeout{};  // of a process's wait for another one that runs a call
};

// Returns the bytes of each rank's heap in the job.
int64_t process_group_heap_bytes(int num_ranks);

// Large because it implements RankGroup.
class ProcessGroup final : public RankGroup {
 public:
  // `local` has the process's rank; its take_sampled() fills only what belongs to the rank's group. `nccl`
  // may be null, in tests.
  ProcessGroup(std::shared_ptr<Job> job, std::unique_ptr<NcclComm> nccl, std::unique_ptr<RankGroup> local,
               const ProcessGroupOptions& options);
  // Ends the other processes' follow(), or the job after a failure.
  ~ProcessGroup() override;

  const ModelConfig& config() const override { return local_->config(); }
  int num_groups() const override { return options_.layout.dp; }
  int64_t num_kv_pages() const override { return local_->num_kv_pages(); }
  int64_t num_window_pages() const override { return local_->num_window_pages(); }
  int page_size() const override { return local_->page_size(); }
  int64_t num_slots() const override { return local_->num_slots(); }
  ThreadPool& pool() override { return local_->pool(); }
  float* logits() override { return local_->logits(); }
  bool samples() const override { return true; }
  Status supports_routed_experts() const override {
    return unsupported("ranks in other processes (--fabric mpi) do not report routed experts");
  }
  const Job* job() const override { return job_.get(); }
  int64_t weight_bytes() const override { return local_->weight_bytes(); }
  int64_t kv_bytes() const override { return local_->kv_bytes(); }
  int64_t comm_bytes() const override { return local_->comm_bytes(); }
  ExpertLoad expert_load() const override { return local_->expert_load(); }

  Status execute_step(std::span<const Batch> groups) override;
  Status set_masked_ids(std::span<const int32_t> ids) override;
  Status start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                      std::span<const uint32_t> allowed, std::span<const int32_t> logprob_ids) override;
  Status take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs) override;
  Status finish_steps() override { return keep(local_->finish_steps()); }
  Status failure() const override;
  Status follow() override;
  void abort() override { job_->abort(failure()); }

 protected:
  Status reload_ranks(const std::string&) override { return not_here("reloading weights"); }
  Result<ExpertMoves> move_experts() override { return not_here("moving experts"); }

 private:
  struct Counts {  // of a group, in one start_sample()
    size_t rows = 0, ids = 0;
  };
  static Status not_here(const char* what) {
    return internal_error(std::string(what) + " on GPUs in several processes");
  }
  int rank() const { return options_.layout.rank; }
  int first_rank_of(int group) const { return group * options_.layout.attention_tp(); }
  Endpoint& endpoint() const { return job_->endpoint(rank()); }
  Status send(const GroupCommand& command);
  Status run(const GroupCommand& command);  // in other processes
  Status take(const GroupCommand& command);
  Status receive_sampled(int rank, std::span<SampledRow> out, std::span<float> id_logprobs);
  void count_sampled(std::span<const SampleRowParams> rows);
  std::vector<Counts> take_counts(size_t num_rows, size_t num_ids);
  void end();         // process 0
  Status end_rank();  // other processes
  Status keep(const Status& status);

  std::shared_ptr<Job> job_;
  std::unique_ptr<NcclComm> nccl_;
  std::unique_ptr<RankGroup> local_;  // uses nccl_
  const ProcessGroupOptions options_;
  std::vector<MessagePipe> there_, back_;    // process 0: by rank - 1; otherwise one each
  StepBatches step_;                         // of the last execute_step()
  std::vector<size_t> num_logit_rows_;       // [dp], of the last step
  std::deque<std::vector<Counts>> sampled_;  // [dp], for each start_sample() not yet taken
  bool has_ended_ = false;
};

}  // namespace fp4moe
