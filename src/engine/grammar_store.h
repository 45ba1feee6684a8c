// GrammarStore: compiles grammars on threads of its own and keeps the ones used last.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "engine/grammar.h"

namespace fp4moe {

struct GrammarLimits {
  int64_t max_text_bytes = 256 << 10;            // of a grammar's text
  int64_t max_grammar_bytes = 64 << 20;          // of a compiled one
  int64_t max_cache_bytes = 128 << 20;           // of those that are kept
  int64_t max_steps = kCompileBudget.max_steps;  // of one compilation
  int64_t max_compile_bytes = 128 << 20;         // that one compilation may use
  std::chrono::milliseconds timeout{20000};      // of one compilation, from its start
  int max_compiling = 2;                         // at once
  int max_compiling_of_client = 1;
  int max_waiting = 1000, max_waiting_of_client = 250;                          // for a compilation
  int64_t max_waiting_bytes = 32 << 20, max_waiting_bytes_of_client = 8 << 20;  // of their texts
  // A client's compilations run with the process's priority for so long at most, then on CPU time that no
  // other thread wants. The allowance grows back by this share of the time that passes.
  std::chrono::milliseconds max_normal_time{100};
  double normal_share = 0.02;
  // Grammars that cannot be compiled are remembered for a while: so many, with so many bytes of text.
  std::chrono::milliseconds failure_time{60000};
  int max_failures = 1000;
  int64_t max_failure_bytes = 8 << 20;
};

using GrammarResult = Result<std::shared_ptr<const Grammar>>;

// A grammar that a request waits for. When the last ticket of a compilation is gone, it is cancelled. For one
// thread at a time; may outlive the store.
class GrammarTicket {
 public:
  struct Wait;
  GrammarTicket() = default;
  explicit GrammarTicket(std::shared_ptr<Wait> wait) : wait_(std::move(wait)) {}
  bool valid() const { return wait_ != nullptr; }
  // Both require valid().
  bool is_ready() const;
  const GrammarResult& get() const;  // waits; the reference is valid as long as the ticket

 private:
  std::shared_ptr<Wait> wait_;
};

// Clients take turns: a client with many waiting grammars delays another client's next one by no more than
// the compilations that are running, at most max_compiling_of_client for each client. All methods from any
// thread.
class GrammarStore {
 public:
  // on_ready is called, with a lock of the store held, when a ticket that was not ready is.
  GrammarStore(std::unique_ptr<GrammarCompiler> compiler, const GrammarLimits& limits,
               std::function<void()> on_ready);
  ~GrammarStore();  // cancels what compiles; tickets that are not ready get kUnavailable

  // At once from memory, or compiled. The ticket's errors: kInvalidArgument (see GrammarCompiler; too long,
  // too large when compiled, or over the budget), kDeadline, kUnavailable (no memory, or too many wait).
  GrammarTicket ask(const GrammarSpec& spec, const std::string& client);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace fp4moe
