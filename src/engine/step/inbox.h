// Inbox: the state that the step loop shares with other threads, protected by one mutex.
//
//   thread            calls
//   any               submit, cancel, release, flush_cache, run_when_idle, rebalance_experts, drain, stats,
//   failure a decode node's   add_event grammar threads   wake the loop's        wait, start_idle_task,
//   end_idle_task, end_rebalance, fail, release_id, publish the watchdog's    abandon the destructor's  stop
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/disagg/decode_node.h"
#include "engine/output/delta_sink.h"
#include "engine/ranks/executor.h"
#include "engine/schedule/sequence.h"
#include "engine/step/throughput_window.h"
#include "fp4moe/engine.h"

namespace fp4moe {

// Work for the loop's thread when all requests submitted before it have ended; later ones wait for its end.
struct IdleTask {
  std::function<Status()> run;
  bool aborts = false;    // end the requests before it at once
  bool is_known = false;  // the loop has seen it: new requests are later ones
  bool has_started = false;
  std::optional<Status> status;  // of the ended task
  int64_t num_waited = 0;        // requests that waited for its end
};

// Input for one iteration of the step loop, in the order in which the loop handles it.
struct LoopInput {
  bool flushes = false;                 // free the cached pages
  std::shared_ptr<IdleTask> idle_task;  // in each input until the task ends
  bool rebalances = false;              // move experts by their loads, then call end_rebalance()
  std::vector<std::unique_ptr<Sequence>> sequences;
  std::vector<KvEvent> events;
  bool has_grammar = false;  // a grammar or mask has become ready
  std::vector<std::string> cancelled_ids, released_ids;
  Status failure;       // not OK: no further step will run
  bool aborts = false;  // end all requests
  bool stops = false;   // then end the loop
};

class Inbox {
 public:
  // `ordinal` counts the submitted requests from 0.
  using MakeSequence = std::function<std::unique_ptr<Sequence>(Request request, uint64_t ordinal)>;

  // The executor is borrowed, for its failure().
  Inbox(const Executor& executor, int64_t max_queued_requests);

  // Names the request if it has no id, and queues the sequence that `make` creates for it; `make` is called
  // with the mutex held. Returns the id. The sequence gets the ticket; if there is an error, the caller keeps
  // it. kUnavailable: draining, or the queue is full; kInvalidArgument: the id is in use.
  Result<std::string> submit(Request request, GrammarTicket& ticket, const MakeSequence& make);
  // Both ignore ids that are not active.
  void cancel(const std::string& id);
  void release(const std::string& id);
  // These work as in Engine.
  Status flush_cache();
  // Runs the task and returns the number of requests that waited for its end, or its error. kUnavailable:
  // another task has not ended, or the engine drains before the task has started.
  Result<int64_t> run_when_idle(std::function<Status()> run, bool aborts);
  Result<ExpertMoves> rebalance_experts();
  void drain(double timeout_seconds);
  EngineStats stats() const;
  Status failure() const;
  void add_event(KvEvent event);
  void wake();  // a grammar or a mask has become ready
  // Aborts all requests and ends the loop.
  void stop();

  // Waits for input and returns it. Does not wait if a step can run, and waits at most 20 ms if some request
  // has not ended, so that the time limits of requests waiting for another node, a grammar or a held prompt's
  // release are checked.
  LoopInput wait(bool can_step, bool has_requests);
  // Returns false if the input's task is to be dropped instead.
  bool start_idle_task();
  // Ends the task of the last input, whether or not it has started. `num_waited`: requests that the loop has
  // taken and that waited.
  void end_idle_task(const Status& status, int64_t num_waited);
  // Wakes rebalance_experts(), which returns `moves`.
  void end_rebalance(const Result<ExpertMoves>& moves);
  // Records that no further step will run.
  void fail(const Status& failure);
  // Makes the id reusable; call before the final delta is delivered. Drops a pending cancel, which must not
  // hit the id's new owner.
  void release_id(const std::string& id);
  // Makes the iteration's changes visible to other threads; wakes drain() and flush_cache().
  void publish(const EngineStats& totals);

  // Call if the loop's thread is stuck in a call. Records the failure, ends the active requests on the
  // calling thread instead, and ends drain().
  void abandon(const Status& failure);

 private:
  using Clock = std::chrono::steady_clock;
  bool has_input(bool has_requests) const;
  void refuse_idle_task();

  const Executor& executor_;
  const int64_t max_queued_requests_;
  const Clock::time_point started_ = Clock::now();
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // there is input, or the loop is to end
  // Nothing is active or ending, the loop is stuck, input_.flushes has become false, or a rebalance has
  // ended.
  std::condition_variable idle_;
  LoopInput input_;                                                     // not yet taken
  std::unordered_map<std::string, std::shared_ptr<DeltaSink>> active_;  // by id; these ids are in use
  int64_t num_ending_ = 0;    // requests that left active_ since the last publish(); their last delta may
                              // not have been delivered yet
  bool is_flushing_ = false;  // wait() has returned input_.flushes; publish() resets both flags
  bool is_draining_ = false, is_stuck_ = false;
  uint64_t num_rebalances_ = 0;                     // that have ended
  Result<ExpertMoves> last_moves_ = ExpertMoves();  // of the last of them
  uint64_t num_submitted_ = 0, num_named_ = 0;
  EngineStats stats_;  // as last published, but num_queue_reqs also counts requests submitted since
  ThroughputWindow throughput_;
};

}  // namespace fp4moe
