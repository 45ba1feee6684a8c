// MpiLink: the communication thread of a process. It makes all MPI calls (through the plug-in): it sends the
// ranks' queued operations, applies received ones to the local ranks' memory, and watches its peers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/doorbell.h"
#include "comm/mpi_frame.h"
#include "comm/mpi_hello.h"
#include "comm/mpi_plugin.h"
#include "comm/process_watch.h"
#include "comm/rank_memory.h"

namespace fp4moe {

// Large because one thread does all communication of a process: start, sends, receives, failures and
// shutdown.
class MpiLink : public FrameSink {
 public:
  // `hello` has this process's number and the number of processes. The plug-in must outlive the link.
  MpiLink(const Fp4moeMpi& mpi, std::shared_ptr<RankMemory> memory, const Hello& hello,
          std::chrono::nanoseconds timeout);

  // Starts the thread (which keeps `self` alive) and waits for the hello of every process. The kDeadline
  // message names the processes that did not start in time; the kInvalidArgument message names the first
  // difference between two processes.
  static Status start(const std::shared_ptr<MpiLink>& self, std::chrono::nanoseconds timeout);
  // Ends the thread: with MPI_Finalize once all processes stop, or without it after the timeout.
  void stop();
  // Ends all processes with MPI_Abort.
  [[noreturn]] void abort();

  // Returns Hello::data of process 0; after start() only.
  const std::string& data() const { return mine_.process == 0 ? mine_.data : data_of_first_; }

  // Queue an operation from rank src of this process to rank dst of another one. Block while too many bytes
  // are queued.
  Status put(int src, int dst, int64_t offset, const void* data, int64_t num_bytes);
  Status signal(int src, int dst, int slot, uint32_t value);
  // Fails the local ranks and sends the failure to all processes.
  void fail(const Status& status);

 private:
  using Clock = std::chrono::steady_clock;
  struct Outbox {
    std::mutex mutex;
    std::condition_variable room;
    std::vector<uint8_t> pending;  // the next frame; guarded by mutex
    std::vector<uint8_t>
        sending;  // the frame being sent while request is not null; communication thread only
    void* request = nullptr;
    std::atomic<bool> has_pending{false};
  };
  // Receives one message at a time, so that messages are applied in order; communication thread only.
  struct Inbox {
    std::vector<uint8_t> bytes;
    void* request = nullptr;
  };
  struct Peer {
    Outbox outbox;
    Inbox inbox;
    bool has_come = false;  // its hello was received; guarded by start_mutex_
    bool has_gone = false;  // its bye was received; communication thread only
  };

  Status hello(int process, std::span<const uint8_t> payload) override;
  void failed(int process, const Status& status) override;
  void bye(int process) override;

  int process_of(int rank) const { return rank / ranks_per_process_; }
  bool is_me(size_t process) const { return static_cast<int>(process) == mine_.process; }
  Status enqueue(int process, const FrameOpHeader& op, const void* payload);
  void append(Peer& peer, const FrameOpHeader& op, const void* payload);  // caller holds outbox.mutex
  void send_to_all(FrameOp op, uint32_t value, std::span<const uint8_t> payload);

  void run();
  bool init();   // initialises MPI and sends the hello to all processes
  void turns();  // the thread's main loop
  bool receive_some();
  bool receive_from(int process);
  bool send_some();
  bool flushed() const;
  bool pending() const;
  void watch(Clock::time_point now);
  void idle(Clock::time_point now);
  bool check(int error, const char* call);  // false, after failing the job, if `error` is not 0
  void set_started(const Status& status);
  std::string ranks_text(int process) const;
  std::string missing_text();

  const Fp4moeMpi& mpi_;
  const std::shared_ptr<RankMemory> memory_;
  const Hello mine_;
  const int ranks_per_process_;
  const Clock::duration timeout_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by process; this process's entry is unused

  std::mutex start_mutex_;
  std::condition_variable start_changed_;
  bool is_initialized_ = false, is_started_ = false, is_finished_ = false;
  Status start_status_;
  std::string data_of_first_;  // Hello::data of process 0; in other processes, set before is_started_

  std::atomic<bool> stopping_{false}, aborting_{false}, sleeping_{false};
  Doorbell bell_;
  // Communication thread only.
  ProcessWatch watch_;
  Clock::time_point last_progress_, next_watch_;
  bool is_broken_ = false;
};

}  // namespace fp4moe
