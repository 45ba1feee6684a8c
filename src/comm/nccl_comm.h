// NcclComm: this process's rank in an NCCL communicator over all ranks of a job, one GPU each. It moves bytes
// between the ranks' GPUs. NCCL neither notices that a rank of the same host has died nor ends its kernels on
// an error, so a thread watches the communicator and ends them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>

#include "comm/nccl.h"
#include "fp4moe/status.h"
#include "kernels/device_comm.h"
#include "kernels/group_plane.h"

namespace fp4moe {

struct NcclCommOptions {
  int rank = 0, num_ranks = 1;
  std::chrono::nanoseconds timeout = std::chrono::seconds(10);        // of a call of NCCL and of a HostWait
  std::chrono::nanoseconds start_timeout = std::chrono::seconds(60);  // for all ranks to connect
  // Returns the job's failure; null: there is no job. Called on the watching thread.
  std::function<Status()> job_failure;
  // Takes a failure that is not the job's. Called at most once, on any thread.
  std::function<void(const Status&)> on_failure;
};

class NcclComm {
 public:
  // Returns an id for all ranks of one communicator. One rank calls it and sends the id to the others.
  static Result<NcclId> make_id(const Nccl& nccl);
  // Connects the ranks; the calling thread's current GPU is the rank's. All ranks call it. kDeadline: they
  // did not connect in time.
  static Result<std::unique_ptr<NcclComm>> open(const Nccl& nccl, const NcclId& id, NcclCommOptions options);
  // Aborts the communicator. Graphs with its operations must have been destroyed and streams synchronized,
  // and no other rank may still wait for this rank.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.num_ranks; }

  // Enqueues the transfers on `stream`, as one operation in which no transfer waits for another;
  // PlaneTransfer names ranks of the communicator. Only the rank's thread may call it. An error is also
  // failure().
  Status exchange(const CommOp& op, std::span<const PlaneTransfer> transfers, StreamHandle stream);

  // Ends the watch: from now on, an error of NCCL is no failure. Call when all ranks' work is complete,
  // before any of them closes its communicator.
  void stop_watching();

  // Returns OK, or why the communicator was aborted: the job's failure, an error of NCCL, or kDeadline for a
  // HostWait or a call that took longer than the timeout. Messages name the rank and the operation.
  // Thread-safe. After a failure, operations are not enqueued, and those in flight end with wrong data.
  Status failure() const;

 private:
  friend class HostWait;
  using Clock = std::chrono::steady_clock;

  NcclComm(const Nccl& nccl, NcclCommOptions options);
  Status connect(const NcclId& id);
  Status send_and_receive(std::span<const PlaneTransfer> transfers, StreamHandle stream);
  Status settle(const char* function, NcclResult result, std::chrono::nanoseconds timeout);
  NcclResult poll();
  void watch();  // runs on watcher_
  void look();
  Status keep(const Status& status);
  void fail(const Status& status, bool is_new);
  void abort_handle();
  static std::string waited_text(std::chrono::nanoseconds time);
  std::string rank_text() const { return "rank " + std::to_string(options_.rank); }

  const Nccl nccl_;
  const NcclCommOptions options_;
  std::mutex calls_;             // held during a call of NCCL; none of them should block
  NcclHandle handle_ = nullptr;  // guarded by calls_; null after an abort

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Status failure_;
  Clock::time_point waits_since_{};  // start of the HostWait; zero: there is none
  std::string waits_in_;
  bool ends_ = false;
  std::thread watcher_;
};

// While it exists, the host waits for enqueued operations: after the communicator's timeout they fail. It may
// be made for null, and does nothing then. One at a time.
class HostWait {
 public:
  // `what` is for the error: "a step of 8 rows".
  HostWait(NcclComm* comm, const std::string& what);
  ~HostWait();
  HostWait(const HostWait&) = delete;
  HostWait& operator=(const HostWait&) = delete;

 private:
  NcclComm* const comm_;
};

}  // namespace fp4moe
