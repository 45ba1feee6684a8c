#include "comm/mpi_link.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "base/guarded.h"
#include "base/log.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

constexpr size_t kOutboxBytes = 4 << 20;  // above this, ranks wait before they queue more
constexpr size_t kMaxFailBytes = 4096;    // of a failure's message
constexpr int kMessagesPerTurn = 8;       // per process

}  // namespace

MpiLink::MpiLink(const Fp4moeMpi& mpi, std::shared_ptr<RankMemory> memory, const Hello& hello,
                 std::chrono::nanoseconds timeout)
    : mpi_(mpi),
      memory_(std::move(memory)),
      mine_(hello),
      ranks_per_process_(hello.num_ranks / hello.num_processes),
      timeout_(timeout) {
  for (int p = 0; p < hello.num_processes; ++p) peers_.push_back(std::make_unique<Peer>());
}

Status MpiLink::start(const std::shared_ptr<MpiLink>& self, std::chrono::nanoseconds timeout) {
  try {
    std::thread([self] { self->run(); }).detach();
  } catch (const std::system_error& error) {
    return does_not_fit(std::string("cannot start the communication thread: ") + error.what());
  }
  std::unique_lock lock(self->start_mutex_);
  const bool started = self->start_changed_.wait_for(lock, timeout, [&] { return self->is_started_; });
  if (started) return self->start_status_;
  const std::string where =
      self->is_initialized_ ? "start-up"
                            : "MPI_Init of the " + std::to_string(self->mine_.num_processes) + " processes";
  const Status status = {StatusCode::kDeadline,
                         "process " + std::to_string(self->mine_.process) + " waited " +
                             std::to_string(std::chrono::ceil<std::chrono::seconds>(timeout).count()) +
                             " s in " + where + " for " + self->missing_text()};
  lock.unlock();
  self->fail(status);
  return status;
}

std::string MpiLink::ranks_text(int process) const {
  const int first = process * ranks_per_process_, last = first + ranks_per_process_ - 1;
  return "process " + std::to_string(process) +
         (first == last ? " (rank " + std::to_string(first)
                        : " (ranks " + std::to_string(first) + " to " + std::to_string(last)) +
         ")";
}

std::string MpiLink::missing_text() {
  std::string text;
  for (size_t p = 0; p < peers_.size(); ++p)
    if (!is_me(p) && !peers_[p]->has_come)
      text += (text.empty() ? "" : ", ") + ranks_text(static_cast<int>(p));
  return is_initialized_ ? text : "one or more of " + text;
}

void MpiLink::set_started(const Status& status) {
  std::lock_guard lock(start_mutex_);
  if (is_started_) return;
  is_started_ = true;
  start_status_ = status;
  start_changed_.notify_all();
}

// ---- called by the ranks' threads

void MpiLink::append(Peer& peer, const FrameOpHeader& op, const void* payload) {
  append_op(peer.outbox.pending, mine_.process, op, payload);
  peer.outbox.has_pending.store(true);
}

Status MpiLink::enqueue(int process, const FrameOpHeader& op, const void* payload) {
  Peer& peer = *peers_[static_cast<size_t>(process)];
  {
    std::unique_lock lock(peer.outbox.mutex);
    const auto deadline = Clock::now() + timeout_;
    while (peer.outbox.pending.size() > kOutboxBytes) {
      if (memory_->failed()) return memory_->failure();
      if (Clock::now() >= deadline) {
        lock.unlock();
        fail({StatusCode::kDeadline, "rank " + std::to_string(op.src) + " could not send to rank " +
                                         std::to_string(op.dst) + ": " + ranks_text(process) +
                                         " received nothing before the deadline"});
        return memory_->failure();
      }
      peer.outbox.room.wait_for(lock, 20ms);
    }
    append(peer, op, payload);
  }
  if (sleeping_.load()) bell_.ring();
  return {};
}

Status MpiLink::put(int src, int dst, int64_t offset, const void* data, int64_t num_bytes) {
  if (memory_->failed()) return memory_->failure();
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  for (int64_t done = 0; done < num_bytes; done += kMaxPutBytes) {
    const FrameOpHeader op = {.op = static_cast<uint32_t>(FrameOp::kPut),
                              .src = static_cast<uint32_t>(src),
                              .dst = static_cast<uint32_t>(dst),
                              .offset = offset + done,
                              .num_bytes = std::min(kMaxPutBytes, num_bytes - done)};
    FP4MOE_RETURN_IF_ERROR(enqueue(process_of(dst), op, bytes + done));
  }
  return {};
}

Status MpiLink::signal(int src, int dst, int slot, uint32_t value) {
  if (memory_->failed()) return memory_->failure();
  const FrameOpHeader op = {.op = static_cast<uint32_t>(FrameOp::kSignal),
                            .src = static_cast<uint32_t>(src),
                            .dst = static_cast<uint32_t>(dst),
                            .slot = static_cast<uint32_t>(slot),
                            .value = value};
  return enqueue(process_of(dst), op, nullptr);
}

void MpiLink::send_to_all(FrameOp op, uint32_t value, std::span<const uint8_t> payload) {
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (is_me(p)) continue;
    std::lock_guard lock(peers_[p]->outbox.mutex);
    append(
        *peers_[p],
        {.op = static_cast<uint32_t>(op), .value = value, .num_bytes = static_cast<int64_t>(payload.size())},
        payload.data());
  }
  bell_.ring();
}

void MpiLink::fail(const Status& status) {
  if (!memory_->fail(status)) return;
  const std::string& text = status.message();
  // Without memory for the frame, the other processes learn of the failure at their deadline.
  static_cast<void>(guarded([&]() -> Status {
    send_to_all(FrameOp::kFail, static_cast<uint32_t>(status.code()),
                {reinterpret_cast<const uint8_t*>(text.data()), std::min(text.size(), kMaxFailBytes)});
    return {};
  }));
}

void MpiLink::stop() {
  stopping_.store(true);
  bell_.ring();
  std::unique_lock lock(start_mutex_);
  if (is_initialized_) start_changed_.wait_for(lock, timeout_ + 2s, [&] { return is_finished_; });
}

void MpiLink::abort() {
  aborting_.store(true);
  bell_.ring();
  std::this_thread::sleep_for(3s);
  std::_Exit(1);  // MPI hangs: the launcher ends the other processes when this one exits
}

// ---- the communication thread

bool MpiLink::check(int error, const char* call) {
  if (error == 0) return true;
  char text[512];
  mpi_.error_text(error, text, sizeof text);
  is_broken_ = true;
  fail(internal_error(std::string(call) + " on process " + std::to_string(mine_.process) + ": " + text));
  set_started(memory_->failure());
  return false;
}

void MpiLink::run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // so that a sleep of 50 us does not take 100 us
  if (init()) turns();
  const bool orderly = !is_broken_ && std::all_of(peers_.begin(), peers_.end(), [&](const auto& peer) {
    return peer == peers_[static_cast<size_t>(mine_.process)] || peer->has_gone;
  });
  if (orderly) mpi_.finalize();
  std::lock_guard lock(start_mutex_);
  is_finished_ = true;
  start_changed_.notify_all();
}

bool MpiLink::init() {
  int process = 0, num_processes = 0;
  if (!check(mpi_.init(&process, &num_processes), "MPI_Init")) return false;
  if (process != mine_.process || num_processes != mine_.num_processes) {
    is_broken_ = true;
    set_started(internal_error("MPI reports process " + std::to_string(process) + " of " +
                               std::to_string(num_processes) +
                               ", but the launcher's environment has process " +
                               std::to_string(mine_.process) + " of " + std::to_string(mine_.num_processes)));
    return false;
  }
  {
    std::lock_guard lock(start_mutex_);
    is_initialized_ = true;
  }
  send_to_all(FrameOp::kHello, 0, encode_hello(mine_));
  if (num_processes == 1) set_started({});
  return true;
}

void MpiLink::turns() {
  last_progress_ = Clock::now();
  Clock::time_point end = Clock::time_point::max();
  bool has_said_bye = false;
  while (!is_broken_) {
    const bool received = receive_some(), sent = send_some();
    const bool progress = received || sent;
    const auto now = Clock::now();
    if (progress) last_progress_ = now;
    watch(now);
    if (aborting_.load()) {
      end = std::min(end, now + 100ms);
      if (flushed() || now >= end) return mpi_.abort(1);
    } else if (stopping_.load()) {
      if (!has_said_bye) {
        has_said_bye = true;
        end = now + (memory_->failed() ? std::min<Clock::duration>(1s, timeout_) : timeout_);
        send_to_all(FrameOp::kBye, 0, {});
      }
      const bool all_gone = std::all_of(peers_.begin(), peers_.end(), [&](const auto& peer) {
        return peer == peers_[static_cast<size_t>(mine_.process)] || peer->has_gone;
      });
      if ((all_gone && flushed()) || now >= end) return;
    }
    if (!progress) idle(now);
  }
}

bool MpiLink::receive_some() {
  bool progress = false;
  for (int p = 0; p < mine_.num_processes; ++p)
    for (int i = 0; i < kMessagesPerTurn && p != mine_.process && receive_from(p); ++i) progress = true;
  return progress;
}

// Returns whether a message was received and applied.
bool MpiLink::receive_from(int process) {
  Inbox& box = peers_[static_cast<size_t>(process)]->inbox;
  if (box.request == nullptr) {
    int num_bytes = 0, is_there = 0;
    if (!check(mpi_.probe(process, &num_bytes, &is_there), "MPI_Iprobe") || is_there == 0) return false;
    if (num_bytes < 0 || num_bytes > kMaxFrameBytes) {
      is_broken_ = true;
      fail(data_loss("message from process " + std::to_string(process) + ": bytes=" +
                     std::to_string(num_bytes) + " must be at most " + std::to_string(kMaxFrameBytes)));
      return false;
    }
    box.bytes.resize(static_cast<size_t>(num_bytes));
    if (!check(mpi_.receive(process, box.bytes.data(), num_bytes, &box.request), "MPI_Irecv")) return false;
  }
  int is_done = 0;
  if (!check(mpi_.done(&box.request, &is_done), "MPI_Test") || is_done == 0) return false;
  const Status status = apply_frame(box.bytes, process, ranks_per_process_, *memory_, *this);
  if (!status.ok()) {
    fail(status);
    set_started(status);
  }
  return true;
}

bool MpiLink::send_some() {
  bool progress = false;
  for (size_t p = 0; p < peers_.size(); ++p) {
    Outbox& box = peers_[p]->outbox;
    if (box.request != nullptr) {
      int is_done = 0;
      if (!check(mpi_.done(&box.request, &is_done), "MPI_Test")) return false;
      if (is_done == 0) continue;
      box.sending.clear();
      progress = true;
    }
    if (!box.has_pending.load()) continue;
    {
      std::lock_guard lock(box.mutex);
      std::swap(box.pending, box.sending);
      box.has_pending.store(false);
    }
    box.room.notify_all();
    if (!check(mpi_.send(static_cast<int>(p), box.sending.data(), static_cast<int>(box.sending.size()),
                         &box.request),
               "MPI_Isend"))
      return false;
    progress = true;
  }
  return progress;
}

bool MpiLink::pending() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const auto& peer) { return peer->outbox.has_pending.load(); });
}

bool MpiLink::flushed() const {
  return !pending() && std::all_of(peers_.begin(), peers_.end(),
                                   [](const auto& peer) { return peer->outbox.request == nullptr; });
}

// If a process dies, the launcher ends the job, and the other processes cannot report the operations in which
// they were waiting. watch() fails the job before that, so that they can.
void MpiLink::watch(Clock::time_point now) {
  if (now < next_watch_) return;
  next_watch_ = now + 1ms;
  const int ended = watch_.first_ended();
  if (ended < 0) return;
  watch_.remove(ended);
  const Status status = unavailable(ranks_text(ended) + " ended unexpectedly");
  fail(status);
  set_started(status);
}

// Yields the core between polls after recent progress, else sleeps. The sleeps become longer while there is
// no progress.
void MpiLink::idle(Clock::time_point now) {
  const auto quiet = now - last_progress_;
  if (quiet < 50us || (memory_->anyone_waits() && quiet < 2ms)) {
    sched_yield();
    return;
  }
  const std::chrono::nanoseconds nap = quiet < 50ms ? 50us : quiet < 5s ? 200us : 1ms;
  sleeping_.store(true);
  const uint32_t bell = bell_.read();
  if (!pending()) bell_.wait(bell, nap);
  sleeping_.store(false);
}

Status MpiLink::hello(int process, std::span<const uint8_t> payload) {
  FP4MOE_ASSIGN_OR_RETURN(const Hello theirs, decode_hello(payload));
  if (theirs.process != process)
    return data_loss("process " + std::to_string(process) + " identifies itself as process " +
                     std::to_string(theirs.process));
  FP4MOE_RETURN_IF_ERROR(check_same(mine_, theirs));
  if (mine_.pid_space != 0 && mine_.pid_space == theirs.pid_space) watch_.add(process, theirs.pid);
  {
    std::lock_guard lock(start_mutex_);
    if (process == 0 && !is_started_) data_of_first_ = theirs.data;
    peers_[static_cast<size_t>(process)]->has_come = true;
    for (size_t p = 0; p < peers_.size(); ++p)
      if (!is_me(p) && !peers_[p]->has_come) return {};
  }
  set_started({});
  return {};
}

void MpiLink::failed(int, const Status& status) {
  memory_->fail(status);
  set_started(status);
}

void MpiLink::bye(int process) {
  peers_[static_cast<size_t>(process)]->has_gone = true;
  watch_.remove(process);
}

}  // namespace fp4moe
