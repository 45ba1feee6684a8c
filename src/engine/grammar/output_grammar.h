// OutputGrammar: the position of one request's output in its grammar. Only MaskThreads call into it, because
// a call into a grammar backend can take seconds: the engine's thread never makes one, and waits for one only
// with a deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/grammar/grammar.h"

namespace fp4moe {

// start() -> kWorking -> kReady -> advance() -> kWorking ... until kEnded or kFailed. While the output is
// kReady, mask threads may also fill the masks after draft tokens (look_ahead()).
class OutputGrammar {
 public:
  enum class State {
    kWorking,  // a mask thread owns the object; the result is pending
    kReady,    // the mask of the next token is ready
    kEnded,    // the text is complete and nothing can follow (GrammarMatcher::has_ended)
    kFailed,   // status() has the reason
  };

  // max_drafts: most draft tokens of a look_ahead().
  OutputGrammar(std::shared_ptr<const Grammar> grammar, int64_t vocab_size, int64_t max_drafts = 0);

  State state() const { return state_.load(std::memory_order_acquire); }
  // Mask of the token after the first `depth` drafts, [ceil(V / 32)] as in GrammarMatcher. Requires kReady
  // and depth <= num_ahead(). Valid until advance() or, if depth > 0, look_ahead().
  std::span<const uint32_t> allowed(int64_t depth = 0) const;
  // Number of drafts, from the first one on, that the grammar allows and after which the mask is ready.
  int64_t num_ahead() const { return num_ahead_.load(std::memory_order_acquire); }
  // Whether num_ahead() can still increase.
  bool is_looking_ahead() const { return is_looking_ahead_.load(std::memory_order_acquire); }
  // Requires kFailed. kInvalidArgument: a call exceeded its budget (the message names the part of the
  // grammar).
  const Status& status() const { return status_; }
  // Whether the slow lane serves this output.
  bool is_slow() const { return is_slow_.load(std::memory_order_relaxed); }
  // Time from start() or advance() to the most recent mask; 0 before the first mask.
  std::chrono::nanoseconds last_duration() const { return last_duration_.load(std::memory_order_relaxed); }

 private:
  friend class MaskThreads;
  using Clock = std::chrono::steady_clock;

  void hand_over(std::span<const int32_t> ids);
  void set_drafts(std::span<const int32_t> drafts);
  void keep_masks_after(std::span<const int32_t> drafts);
  void stop_looking();
  bool is_wanted() const { return state() == State::kWorking || is_looking_ahead(); }
  Status work(GrammarBudget budget);
  Status look(std::span<const int32_t> drafts, GrammarBudget budget, bool& has_mask);
  Status restore(const GrammarBudget& budget);
  size_t roll_back_to(std::span<const int32_t> ids);
  void restart();
  bool is_cancelled() const { return is_cancelled_.load(std::memory_order_relaxed); }

  const std::shared_ptr<const Grammar> grammar_;
  std::atomic<State> state_{State::kWorking};
  std::atomic<bool> is_cancelled_{false}, is_slow_{false}, is_looking_ahead_{false};
  std::atomic<int64_t> num_ahead_{0};
  std::atomic<std::chrono::nanoseconds> last_duration_{std::chrono::nanoseconds(0)};

  // Owned by the mask thread that works on it; by the engine's thread otherwise.
  std::unique_ptr<GrammarMatcher> matcher_;  // null: must be created, then accept accepted_ again
  std::vector<int32_t> accepted_;
  std::vector<int32_t> ahead_;     // drafts that matcher_ has accepted after accepted_
  std::vector<int32_t> next_ids_;  // to be accepted before the mask is filled
  std::vector<uint32_t> allowed_;
  std::vector<std::vector<uint32_t>> allowed_ahead_;  // [max_drafts], [depth - 1] as allowed(depth)
  Status status_;
  Clock::time_point handed_over_;
  int num_cheap_ = 0;  // consecutive slow-lane calls that the fast lane would have finished

  // Guarded by the mutex of MaskThreads.
  bool is_queued_ = false;       // in a lane, or in a call
  std::vector<int32_t> drafts_;  // of the last look_ahead()
  uint64_t num_changes_ = 0;     // of drafts_; a call for earlier drafts has no result
};

struct MaskLimits {
  int num_fast_threads = 2;  // at least two, so that one expensive call does not delay cheap ones
  int num_slow_threads = 1;
  // Budget of one call in the fast lane, a few milliseconds. An output that exceeds it moves to the slow
  // lane.
  int64_t max_fast_steps = 1'000'000;
  // Budget of each accept() and each mask in the slow lane. An output that exceeds it fails.
  int64_t max_steps = kMaskBudget.max_steps;
  int64_t max_bytes = kMaskBudget.max_bytes;
};

// Two lanes, each first come, first served; an output has at most one call in progress. The fast lane's
// threads run at the process's priority. A call that exceeds max_fast_steps is abandoned there and repeated
// in the slow lane, whose threads run at a lower priority. Later calls of that output stay in the slow lane
// until kPromoteAfter of them in a row were cheap, and later outputs with the same grammar start there. A
// hostile grammar thus delays a cheap mask by at most one short call, and takes little CPU time from the
// model's threads. Masks after drafts are filled in the fast lane only, one per call.
class MaskThreads {
 public:
  static constexpr int kPromoteAfter = 16;

  // `on_done` is called on a mask thread whenever an output leaves kWorking. Throws std::system_error if the
  // system refuses to create a thread.
  MaskThreads(const MaskLimits& limits, std::function<void()> on_done);
  ~MaskThreads();  // cancels all calls

  // Creates the matcher, accepts first_id if given, and fills the mask of the next token. Call once per
  // output.
  void start(const std::shared_ptr<OutputGrammar>& output, std::optional<int32_t> first_id = std::nullopt);
  // Accepts `ids` in order and fills the mask of the following token. Requires kReady.
  void advance(const std::shared_ptr<OutputGrammar>& output, std::span<const int32_t> ids);
  // Fills the masks after each of `drafts`, which may follow the accepted tokens, up to the first draft that
  // the grammar refuses or after which nothing can follow. A draft advances the output only if advance() has
  // the same token. In the slow lane no masks are filled; those after other drafts are dropped.
  void look_ahead(const std::shared_ptr<OutputGrammar>& output, std::span<const int32_t> drafts);
  // Cancels the call in progress, if any, without waiting for it. A mask thread destroys the object, which
  // can take long: a parser can have many states.
  void retire(std::shared_ptr<OutputGrammar> output);
  // Waits until none of `outputs` is in kWorking or looking ahead, at most until the deadline.
  void wait_for(std::span<OutputGrammar* const> outputs, std::chrono::steady_clock::time_point deadline);

 private:
  using OutputPtr = std::shared_ptr<OutputGrammar>;
  struct Lane {
    bool is_slow = false;
    std::deque<OutputPtr> waiting;
    std::condition_variable changed;
  };

  void add_thread(Lane& lane);
  void stop();
  void enqueue(const OutputPtr& output);  // requires the lock
  void run(Lane& lane);
  void work(Lane& lane, OutputGrammar& output);
  void look(OutputGrammar& output, std::span<const int32_t> drafts, uint64_t num_changes);
  void demote(OutputGrammar& output);
  void count_cheap(OutputGrammar& output, int64_t num_steps) const;
  void finish(OutputGrammar& output, Status status);

  const MaskLimits limits_;
  const std::function<void()> on_done_;
  std::mutex mutex_;
  Lane fast_, slow_;
  std::condition_variable done_;
  std::vector<OutputGrammar*> running_;  // with a call in progress
  // Grammars that caused a demotion; expired ones are removed when one is added.
  std::map<std::weak_ptr<const Grammar>, bool, std::owner_less<>> slow_grammars_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fp4moe
