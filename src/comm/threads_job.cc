#include <atomic>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "comm/job.h"
#include "comm/local_endpoint.h"

namespace fp4moe {
namespace {

class ThreadsJob : public Job {
 public:
  ThreadsJob(const Fabric& fabric, std::unique_ptr<RankMemory> memory, std::string data)
      : fabric_(fabric), data_(std::move(data)), memory_(std::move(memory)) {
    for (int rank = 0; rank < fabric.num_ranks; ++rank)
      endpoints_.push_back(std::make_unique<LocalEndpoint>(*memory_, rank));
  }

  const Fabric& fabric() const override { return fabric_; }
  int num_processes() const override { return 1; }
  int process() const override { return 0; }
  int first_rank() const override { return 0; }
  int num_local_ranks() const override { return fabric_.num_ranks; }
  std::string data() const override { return data_; }
  Endpoint& endpoint(int rank) override {
    FP4MOE_CHECK(rank >= 0 && rank < fabric_.num_ranks, "rank " + std::to_string(rank));
    return *endpoints_[static_cast<size_t>(rank)];
  }
  void abort(const Status& status) override {
    if (!has_aborted_.exchange(true)) log_error("the job ends: " + status.message());
    memory_->fail(status);
  }

 private:
  const Fabric fabric_;
  const std::string data_;
  std::atomic<bool> has_aborted_{false};
  std::unique_ptr<RankMemory> memory_;
  std::vector<std::unique_ptr<LocalEndpoint>> endpoints_;
};

}  // namespace

Result<std::unique_ptr<Job>> open_threads_job(const JobOptions& options, const Fabric& fabric) {
  FP4MOE_ASSIGN_OR_RETURN(std::unique_ptr<RankMemory> memory,
                          RankMemory::make({.num_ranks = fabric.num_ranks,
                                            .num_local_ranks = fabric.num_ranks,
                                            .heap_bytes = options.heap_bytes,
                                            .first_signal = options.first_signal}));
  return std::unique_ptr<Job>(std::make_unique<ThreadsJob>(fabric, std::move(memory), options.data));
}

}  // namespace fp4moe
