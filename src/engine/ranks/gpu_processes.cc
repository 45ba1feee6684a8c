// How the processes of a model with one GPU each find each other: the job, NCCL's communicator over it, and
// the numbers on which all processes agree.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/communicator.h"
#include "comm/job.h"
#include "comm/nccl_comm.h"
#include "device/device.h"
#include "device/device_context.h"
#include "device/device_info.h"
#include "engine/ranks/gpu_group.h"
#include "engine/ranks/process_group.h"
#include "engine/ranks/rank_config.h"

namespace fp4moe {
namespace {

// Waits of processes for each other last longer than those of GPUs, whose errors name the operation.
constexpr std::chrono::milliseconds kMoreTime{500};
constexpr int64_t kAgreedBytes = 256, kAgreedStaging = 64 << 10;  // of records, and of collectives

// Process 0 makes NCCL's id before the job opens, which sends it to all processes.
Result<std::shared_ptr<Job>> open_job(const RankSetup& setup, const Nccl& nccl, int64_t agreed_bytes) {
  const ModelPlan& plan = setup.plan;
  const int num_ranks = plan.moe.problem().layout.tp;
  JobOptions options{
      .fabric = plan.moe.fabric().name,
      .num_ranks = num_ranks,
      .heap_bytes = agreed_bytes + process_group_heap_bytes(num_ranks),
      .timeout_seconds = setup.flags.comm_timeout,
      .config_text =
          rank_config_text(setup.checkpoint, setup.config, plan, setup.flags, setup.options, setup.draft) +
          ", NCCL " + nccl_version_text(nccl.version),
  };
  if (launcher_info().process == 0) {
    FP4MOE_ASSIGN_OR_RETURN(const NcclId id, NcclComm::make_id(nccl));
    options.data.assign(id.bytes.begin(), id.bytes.end());
  }
  FP4MOE_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::open(options));
  return std::shared_ptr<Job>(std::move(job));
}

Result<std::unique_ptr<NcclComm>> open_nccl(const RankSetup& setup, const Nccl& nccl,
                                            const std::shared_ptr<Job>& job) {
  NcclId id;
  const std::string data = job->data();
  if (data.size() != id.bytes.size())
    return data_loss("process 0 sends an NCCL id of " + std::to_string(data.size()) + " bytes instead of " +
                     std::to_string(id.bytes.size()));
  std::memcpy(id.bytes.data(), data.data(), data.size());
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, DeviceContext::of(gpu_of_rank(0)));
  const DeviceScope on_gpu(*gpu);
  const int rank = job->first_rank();
  return NcclComm::open(
      nccl, id,
      {.rank = rank,
       .num_ranks = setup.plan.moe.problem().layout.tp,
       .timeout = comm_timeout(setup.flags),
       .job_failure = [job, rank] { return job->endpoint(rank).failure(); },
       .on_failure = [job, rank](const Status& status) { job->endpoint(rank).fail(status); }});
}

// Two processes on one GPU would fail later, with an error of NCCL that does not name the cause.
Status check_gpus(Communicator& all) {
  FP4MOE_ASSIGN_OR_RETURN(const DeviceInfo own, device_info(gpu_of_rank(0)));
  std::vector<GpuUuid> uuids(static_cast<size_t>(all.size()));
  FP4MOE_RETURN_IF_ERROR(all.exchange({"gpu_uuid"}, own.uuid.data(), sizeof own.uuid, uuids.data()));
  return check_own_gpus(uuids);
}

// Processes may have memory for fewer pages, as ranks on CPUs.
Status agree_on_sizes(Communicator& all, RankGroupOptions& options) {
  std::vector<KvCounts> counts(static_cast<size_t>(all.size()));
  const KvCounts own{options.num_kv_pages, options.num_window_pages, options.num_slots};
  FP4MOE_RETURN_IF_ERROR(all.exchange({"kv_pages"}, &own, sizeof own, counts.data()));
  for (const KvCounts& other : counts) {
    options.num_kv_pages = std::min(options.num_kv_pages, other.full);
    options.num_window_pages = std::min(options.num_window_pages, other.window);
    options.num_slots = std::min(options.num_slots, other.slots);
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<RankGroup>> make_gpu_processes(const RankSetup& setup, const StepLimits& limits) {
  const RankLayout& layout = setup.plan.moe.problem().layout;
  if (setup.options.wants_logits && layout.dp > 1)
    return unsupported("logits of " + std::to_string(layout.dp) +
                       " data-parallel groups on GPUs in several processes (--fabric mpi); nearest legal "
                       "choice: --dp 1");
  // Graphs exchange scratch memory, which NCCL would otherwise register with the other processes.
  setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
  FP4MOE_ASSIGN_OR_RETURN(const Nccl nccl, Nccl::open());
  const CommRegion region{.offset = process_group_heap_bytes(layout.tp),
                          .record_bytes = kAgreedBytes,
                          .staging_bytes = kAgreedStaging};
  FP4MOE_ASSIGN_OR_RETURN(
      const std::shared_ptr<Job> job,
      open_job(setup, nccl, Communicator::heap_bytes(layout.tp, kAgreedBytes, kAgreedStaging)));
  const int rank = job->first_rank();
  Communicator all(job->endpoint(rank), 0, layout.tp, region, {.timeout = kNoDeadline});
  // The job fails before the communicator closes, which the other ranks would report instead.
  const auto fail = [&](const Status& status) {
    job->endpoint(rank).fail(status.with_context("rank " + std::to_string(rank)));
    return job->endpoint(rank).failure();
  };
  if (const Status status = check_gpus(all); !status.ok()) return fail(status);
  RankGroupOptions options = setup.options;
  FP4MOE_RETURN_IF_ERROR(agree_on_sizes(all, options));
  Result<std::unique_ptr<NcclComm>> comm = open_nccl(setup, nccl, job);
  if (!comm.ok()) return fail(comm.status());
  const OtherProcesses others{**comm, [&all] { return all.barrier({"start"}); }};
  const RankSetup own{setup.checkpoint, setup.config,      setup.plan,  setup.flags, options,
                      setup.memory,     setup.num_threads, setup.draft, setup.form,  &others};
  Result<std::unique_ptr<RankGroup>> local = make_gpu_group(own);
  if (!local.ok()) return fail(local.status());
  ProcessGroupOptions group{
      .layout = layout, .limits = limits, .timeout = comm_timeout(setup.flags) + kMoreTime};
  group.layout.rank = rank;
  group.limits.num_unknown_ids = limits.max_logit_rows;
  return std::unique_ptr<RankGroup>(
      std::make_unique<ProcessGroup>(job, std::move(*comm), std::move(*local), group));
}

}  // namespace fp4moe
