// GrammarStore: compiles grammars on threads of its own and keeps the ones used last.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>

#include "engine/grammar.h"

namespace fp4moe {

struct GrammarLimits {
  int64_t max_text_bytes = 256 << 10;     // of a grammar as it is given
  int64_t max_grammar_bytes = 256 << 20;  // of one that is compiled
  int64_t max_cache_bytes = 512 << 20;    // of those that are kept
  std::chrono::milliseconds timeout{20000};
  int max_compiling = 2;   // at once
  int max_waiting = 1000;  // for that
  int max_overdue = 4;     // that compile after their timeout; while there are so many, nothing is compiled
};

// A grammar that was asked for: one of its errors, or the grammar, maybe later.
using GrammarTicket = std::shared_future<Result<std::shared_ptr<const Grammar>>>;
bool is_ready(const GrammarTicket& ticket);

// A compilation cannot be stopped: one that takes too long is given up, but runs on, and what it makes is
// kept for the next request. All methods from any thread.
class GrammarStore {
 public:
  // on_ready is called, with a lock of the store held, when a ticket that was not ready is.
  GrammarStore(std::unique_ptr<GrammarCompiler> compiler, const GrammarLimits& limits,
               std::function<void()> on_ready);
  // Waits for what compiles until its timeout, for what is overdue a second.
  ~GrammarStore();

  // At once from memory, or compiled. The ticket's errors: kInvalidArgument (see GrammarCompiler; too long,
  // or too large when compiled), kDeadline, kUnavailable (no memory; too many wait
  // or are overdue).
  GrammarTicket ask(const GrammarSpec& spec);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fp4moe
