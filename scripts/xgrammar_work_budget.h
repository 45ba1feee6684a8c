// Bounds the work, the memory and the recursion of a call into xgrammar. scripts/setup copies this file into
// xgrammar's sources; scripts/xgrammar.patch calls it in every loop and recursion whose length a grammar decides.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <utility>

namespace xgrammar {

// The budget of the calls that this thread makes while the object exists. Without one nothing is bounded. Steps and
// bytes are counted, never measured: a call with the same input and the same budget always ends the same way.
class WorkBudget {
 public:
  enum class Limit { kSteps, kBytes, kDepth, kCancelled };

  // What Spend(), Charge() and Depth throw.
  class Error : public std::exception {
   public:
    explicit Error(Limit limit) : limit_(limit) {}
    Limit limit() const { return limit_; }
    // The grammar's rule that was worked on; empty if there was none yet.
    const std::string& rule() const { return rule_; }
    void SetRule(std::string rule) {
      if (rule_.empty()) rule_ = std::move(rule);
    }
    const char* what() const noexcept override { return "over the work budget"; }

   private:
    Limit limit_;
    std::string rule_;
  };

  static constexpr int kMaxDepth = 500;

  WorkBudget(int64_t max_steps, int64_t max_bytes, const std::atomic<bool>* is_cancelled)
      : outer_(state()) {
    state() = State{};
    state().is_active = true;
    state().steps_left = max_steps;
    state().bytes_left = max_bytes;
    state().is_cancelled = is_cancelled;
    max_steps_ = max_steps;
  }
  ~WorkBudget() { state() = outer_; }
  WorkBudget(const WorkBudget&) = delete;
  WorkBudget& operator=(const WorkBudget&) = delete;

  int64_t num_steps() const { return max_steps_ - state().steps_left - state().slice; }

  // Counts work that is about to be done. A step is one automaton edge, parser state, grammar expression or token.
  static void Spend(int64_t num_steps) {
    if ((state().slice -= num_steps) < 0) TakeSlice();
  }

  // Counts memory that is about to be allocated.
  static void Charge(int64_t num_bytes) {
    if ((state().bytes_left -= num_bytes) < 0 && state().is_active) throw Error(Limit::kBytes);
  }
  static void Refund(int64_t num_bytes) noexcept { state().bytes_left += num_bytes; }

  // One level of a recursion.
  class Depth {
   public:
    Depth() {
      Spend(1);
      if (state().depth >= kMaxDepth && state().is_active) throw Error(Limit::kDepth);
      ++state().depth;
    }
    ~Depth() { --state().depth; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
  };

 private:
  struct State {
    int64_t slice = 0;  // of the steps, taken out of steps_left: is_cancelled is read once a slice
    int64_t steps_left = 0;
    int64_t bytes_left = 0;
    const std::atomic<bool>* is_cancelled = nullptr;
    int depth = 0;
    bool is_active = false;
  };

  static State& state() {
    static thread_local State state;
    return state;
  }

  static void TakeSlice() {
    constexpr int64_t kSlice = 1 << 14;
    State& s = state();
    if (!s.is_active) {
      s.slice = std::numeric_limits<int64_t>::max() / 2;
      return;
    }
    const int64_t num_wanted = kSlice - s.slice;  // what is spent already, and a slice
    if (s.is_cancelled != nullptr && s.is_cancelled->load(std::memory_order_relaxed)) throw Error(Limit::kCancelled);
    if (s.steps_left + s.slice < 0) throw Error(Limit::kSteps);
    const int64_t num_taken = num_wanted < s.steps_left ? num_wanted : s.steps_left;
    s.steps_left -= num_taken;
    s.slice += num_taken;
  }

  State outer_;
  int64_t max_steps_ = 0;
};

}  // namespace xgrammar
