// AnswerGrammar: one answer's position in its grammar. MaskThreads do all work on it: a call into a grammar
// backend can take seconds, so the engine's thread makes none and never waits for one without a bound.
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

#include "engine/grammar.h"

namespace fp4moe {

// start() -> kWorking -> kReady -> advance() -> kWorking ... until kEnded or kFailed.
class AnswerGrammar {
 public:
  enum class State {
    kWorking,  // the mask threads have it: nothing else is known
    kReady,    // the mask of the next token is there
    kEnded,    // the text is whole and nothing can follow (GrammarMatcher::has_ended)
    kFailed,   // status() says why
  };

  AnswerGrammar(std::shared_ptr<const Grammar> grammar, int64_t vocab_size);

  State state() const { return state_.load(std::memory_order_acquire); }
  // The mask of the next token, [ceil(V / 32)] as in GrammarMatcher. Requires kReady; valid until advance().
  std::span<const uint32_t> allowed() const;
  // Requires kFailed. kInvalidArgument: over the budget (the message names the construct).
  const Status& status() const { return status_; }
  // Whether the mask threads serve it in the slow lane.
  bool is_slow() const { return is_slow_.load(std::memory_order_relaxed); }
  // Of the last mask that is known: from start() or advance() on. 0 before the first.
  std::chrono::nanoseconds last_duration() const { return last_duration_.load(std::memory_order_relaxed); }

 private:
  friend class MaskThreads;
  using Clock = std::chrono::steady_clock;

  void hand_over(std::optional<int32_t> id);
  Status work(GrammarBudget budget);
  void restart() { matcher_.reset(); }
  bool is_cancelled() const { return is_cancelled_.load(std::memory_order_relaxed); }

  const std::shared_ptr<const Grammar> grammar_;
  std::atomic<State> state_{State::kWorking};
  std::atomic<bool> is_cancelled_{false}, is_slow_{false};
  std::atomic<std::chrono::nanoseconds> last_duration_{std::chrono::nanoseconds(0)};

  // Of the thread that works on it, or of the engine's while none does.
  std::unique_ptr<GrammarMatcher> matcher_;  // null: to be made, and to take accepted_ again
  std::vector<int32_t> accepted_;
  std::optional<int32_t> next_id_;  // to be accepted before the mask is filled
  std::vector<uint32_t> allowed_;
  Status status_;
  Clock::time_point handed_over_;
  int num_cheap_ = 0;  // calls in a row, in the slow lane, that the fast lane would have finished
};

struct MaskLimits {
  int num_fast_threads = 2;  // at least two: one hostile call then delays no cheap one
  int num_slow_threads = 1;
  // What one call in the fast lane may cost before the answer moves to the slow one: some milliseconds.
  int64_t max_fast_steps = 1'000'000;
  // Of each accept() and each mask in the slow lane; over it the answer fails.
  int64_t max_steps = kMaskBudget.max_steps;
  int64_t max_bytes = kMaskBudget.max_bytes;
};

// Two lanes, each first come, first served, with at most one call of an answer in it. The fast lane's threads
// have the process's priority. A call that costs more than max_fast_steps is given up there, and made again
// in the slow lane, whose threads run only on CPU time that nobody else wants; so do all further calls of
// that answer, until kPromoteAfter of them in a row were cheap, and of answers that start with the same
// grammar later. A hostile grammar thus delays a cheap mask by one short call, and the model's threads not at
// all.
class MaskThreads {
 public:
  static constexpr int kPromoteAfter = 16;

  // `on_done` is called on a mask thread whenever an answer leaves kWorking. Throws std::system_error if the
  // system refuses a thread.
  MaskThreads(const MaskLimits& limits, std::function<void()> on_done);
  ~MaskThreads();  // cancels all calls

  // Makes the answer's matcher, has it accept first_id, if there is one, and fills the mask of the next
  // token. Once for each answer.
  void start(const std::shared_ptr<AnswerGrammar>& answer, std::optional<int32_t> first_id = std::nullopt);
  // Accepts `id` and fills the mask of the token after it. Requires kReady.
  void advance(const std::shared_ptr<AnswerGrammar>& answer, int32_t id);
  // Cancels the answer's call, if there is one, without waiting for it, and frees the answer on a mask
  // thread: a parser's states may be many.
  void retire(std::shared_ptr<AnswerGrammar> answer);
  // Waits until no answer is in kWorking, at most until the deadline.
  void wait_for(std::span<AnswerGrammar* const> answers, std::chrono::steady_clock::time_point deadline);

 private:
  using AnswerPtr = std::shared_ptr<AnswerGrammar>;
  struct Lane {
    bool is_slow = false;
    std::deque<AnswerPtr> waiting;
    std::condition_variable changed;
  };

  void add_thread(Lane& lane);
  void stop();
  void enqueue(const AnswerPtr& answer);
  void run(Lane& lane);
  void work(Lane& lane, AnswerPtr answer);
  bool is_known_slow(const AnswerGrammar& answer) const;
  void demote(AnswerGrammar& answer);
  void count_cheap(AnswerGrammar& answer, int64_t num_steps) const;
  void finish(AnswerGrammar& answer, Status status);

  const MaskLimits limits_;
  const std::function<void()> on_done_;
  mutable std::mutex mutex_;
  Lane fast_, slow_;
  std::condition_variable done_;
  std::vector<AnswerGrammar*> running_;  // their calls are being made
  // Grammars that an answer was demoted for. Those that are gone are forgotten when one is added.
  std::map<std::weak_ptr<const Grammar>, bool, std::owner_less<>> slow_grammars_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fp4moe
