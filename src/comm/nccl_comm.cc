#include "comm/nccl_comm.h"

#include <utility>

#include "base/check.h"
#include "base/seconds.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

constexpr auto kLookInterval = 20ms;
constexpr auto kAbortWait = 1s;

std::string op_text(const CommOp& op) {
  return op.layer < 0 ? op.name : std::string(op.name) + ", layer " + std::to_string(op.layer);
}

}  // namespace

std::string NcclComm::waited_text(std::chrono::nanoseconds time) {
  const double seconds = std::chrono::duration<double>(time).count();
  return "waited " + seconds_text(seconds) + " for the other ranks in ";
}

Result<NcclId> NcclComm::make_id(const Nccl& nccl) {
  NcclId id;
  FP4MOE_RETURN_IF_ERROR(nccl.check("ncclGetUniqueId", nccl.unique_id(&id)));
  return id;
}

Result<std::unique_ptr<NcclComm>> NcclComm::open(const Nccl& nccl, const NcclId& id,
                                                 NcclCommOptions options) {
  FP4MOE_CHECK(options.rank >= 0 && options.rank < options.num_ranks,
               "rank " + std::to_string(options.rank) + " of " + std::to_string(options.num_ranks));
  std::unique_ptr<NcclComm> comm(new NcclComm(nccl, std::move(options)));
  FP4MOE_RETURN_IF_ERROR(comm->connect(id));
  return comm;
}

NcclComm::NcclComm(const Nccl& nccl, NcclCommOptions options) : nccl_(nccl), options_(std::move(options)) {
  watcher_ = std::thread([this] { watch(); });
}

NcclComm::~NcclComm() {
  stop_watching();
  abort_handle();
}

void NcclComm::stop_watching() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

Status NcclComm::connect(const NcclId& id) {
  NcclConfig config;
  NcclResult result = NcclResult::kSuccess;
  {
    std::lock_guard lock(calls_);
    result = nccl_.init_rank(&handle_, options_.num_ranks, id, options_.rank, &config);
  }
  return keep(settle("ncclCommInitRankConfig", result, options_.start_timeout).with_context(rank_text()));
}

Status NcclComm::exchange(const CommOp& op, std::span<const PlaneTransfer> transfers, StreamHandle stream) {
  if (const Status failed = failure(); !failed.ok()) return failed;
  return keep(send_and_receive(transfers, stream).with_context(rank_text() + " in " + op_text(op)));
}

// A group must be ended even after an error.
Status NcclComm::send_and_receive(std::span<const PlaneTransfer> transfers, StreamHandle stream) {
  Status status;
  NcclResult result = NcclResult::kSuccess;
  const auto call = [&](const char* function, NcclResult returned) {
    if (status.ok()) status = nccl_.check(function, returned);
  };
  {
    std::lock_guard lock(calls_);
    if (handle_ == nullptr) return failure();
    call("ncclGroupStart", nccl_.group_start());
    for (const PlaneTransfer& t : transfers) {
      const auto sent = static_cast<size_t>(t.send_bytes), received = static_cast<size_t>(t.receive_bytes);
      if (sent > 0) call("ncclSend", nccl_.send(t.send, sent, NcclType::kUint8, t.peer, handle_, stream));
      if (received > 0)
        call("ncclRecv", nccl_.receive(t.receive, received, NcclType::kUint8, t.peer, handle_, stream));
    }
    result = nccl_.group_end();
  }
  FP4MOE_RETURN_IF_ERROR(status);
  return settle("ncclGroupEnd", result, options_.timeout);
}

// Waits until a call that has returned `result` is complete.
Status NcclComm::settle(const char* function, NcclResult result, std::chrono::nanoseconds timeout) {
  const auto begin = Clock::now();
  while (result == NcclResult::kInProgress) {
    FP4MOE_RETURN_IF_ERROR(failure());
    result = poll();
    if (result != NcclResult::kInProgress) break;
    if (Clock::now() - begin >= timeout) return {StatusCode::kDeadline, waited_text(timeout) + function};
    std::this_thread::yield();
  }
  FP4MOE_RETURN_IF_ERROR(failure());  // after which an abort may have ended the loop
  return nccl_.check(function, result);
}

// Returns the communicator's asynchronous error; kInProgress while another thread calls NCCL, and kSuccess
// after an abort.
NcclResult NcclComm::poll() {
  const std::unique_lock lock(calls_, std::try_to_lock);
  NcclResult result = NcclResult::kInProgress;
  if (!lock.owns_lock()) return result;
  if (handle_ == nullptr) return NcclResult::kSuccess;
  const NcclResult returned = nccl_.async_error(handle_, &result);
  return returned == NcclResult::kSuccess ? result : returned;
}

void NcclComm::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookInterval, [this] { return ends_; })) {
    if (!failure_.ok()) continue;
    lock.unlock();
    look();
    lock.lock();
  }
}

void NcclComm::look() {
  if (options_.job_failure != nullptr) {
    if (const Status failed = options_.job_failure(); !failed.ok()) return fail(failed, /*is_new=*/false);
  }
  Clock::time_point since;
  std::string what;
  {
    std::lock_guard lock(mutex_);
    since = waits_since_;
    what = waits_in_;
  }
  if (since != Clock::time_point() && Clock::now() - since >= options_.timeout)
    return fail({StatusCode::kDeadline, rank_text() + " " + waited_text(options_.timeout) + what},
                /*is_new=*/true);
  const Status status = nccl_.check("ncclCommGetAsyncError", poll());
  if (!status.ok()) fail(status.with_context(rank_text()), /*is_new=*/true);
}

// Makes an error of a call failure(), and returns the first failure.
Status NcclComm::keep(const Status& status) {
  if (status.ok()) return status;
  fail(status, /*is_new=*/true);
  return failure();
}

// Keeps the first failure, reports it to the job if `is_new`, and ends the operations in flight.
void NcclComm::fail(const Status& status, bool is_new) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  if (is_new && options_.on_failure != nullptr) options_.on_failure(status);
  abort_handle();
}

// A call that does not return must not keep the communicator from being aborted.
void NcclComm::abort_handle() {
  const auto end = Clock::now() + kAbortWait;
  std::unique_lock lock(calls_, std::try_to_lock);
  while (!lock.owns_lock() && Clock::now() < end) {
    std::this_thread::sleep_for(1ms);
    static_cast<void>(lock.try_lock());
  }
  if (NcclHandle aborted = std::exchange(handle_, nullptr); aborted != nullptr)
    static_cast<void>(nccl_.abort(aborted));
}

Status NcclComm::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

HostWait::HostWait(NcclComm* comm, const std::string& what) : comm_(comm) {
  if (comm == nullptr) return;
  std::lock_guard lock(comm->mutex_);
  comm->waits_since_ = NcclComm::Clock::now();
  comm->waits_in_ = what;
}

HostWait::~HostWait() {
  if (comm_ == nullptr) return;
  std::lock_guard lock(comm_->mutex_);
  comm_->waits_since_ = {};
}

}  // namespace fp4moe
