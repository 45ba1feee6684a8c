// GrammarStore: compiles grammars on background threads and caches the most recently used.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "engine/grammar/grammar.h"

namespace fp4moe {

struct GrammarLimits {
  int64_t max_text_bytes = 256 << 10;            // text of one grammar
  int64_t max_grammar_bytes = 64 << 20;          // one compiled grammar
  int64_t max_cache_bytes = 128 << 20;           // all cached grammars
  int64_t max_steps = kCompileBudget.max_steps;  // of one compilation
  int64_t max_compile_bytes = 128 << 20;         // memory of one compilation
  std::chrono::milliseconds timeout{60000};      // of one compilation, from its start
  int max_compiling = 2;                         // at the same time
  int max_compiling_of_client = 1;
  int max_waiting = 1000, max_waiting_of_client = 250;                          // queued compilations
  int64_t max_waiting_bytes = 32 << 20, max_waiting_bytes_of_client = 8 << 20;  // their grammar text
  // Cache of failed compilations: lifetime of an entry, number of entries, bytes of text.
  std::chrono::milliseconds failure_time{60000};
  int max_failures = 1000;
  int64_t max_failure_bytes = 8 << 20;
};

using GrammarResult = Result<std::shared_ptr<const Grammar>>;

// A grammar that a request waits for. When the last ticket of a compilation is destroyed, the compilation is
// cancelled. Not thread-safe; may outlive the store.
class GrammarTicket {
 public:
  struct Wait;
  GrammarTicket() = default;
  explicit GrammarTicket(std::shared_ptr<Wait> wait) : wait_(std::move(wait)) {}
  bool valid() const { return wait_ != nullptr; }
  // Both require valid().
  bool is_ready() const;
  const GrammarResult& get() const;  // waits; the reference stays valid as long as the ticket

 private:
  std::shared_ptr<Wait> wait_;
};

// Clients take turns: however many grammars a client queues, it delays another client's next grammar only by
// the compilations that are already running, at most max_compiling_of_client per client. Thread-safe.
class GrammarStore {
 public:
  // on_ready is called, with the store's lock held, whenever a pending ticket becomes ready.
  GrammarStore(std::unique_ptr<GrammarCompiler> compiler, const GrammarLimits& limits,
               std::function<void()> on_ready);
  ~GrammarStore();  // cancels compilations; pending tickets get kUnavailable

  // Returns a cached result at once, otherwise compiles. The ticket's errors: kInvalidArgument (see
  // GrammarCompiler; also if the text is too long or the compiled grammar too large), kDeadline, kUnavailable
  // (out of memory or too many compilations queued).
  GrammarTicket ask(const GrammarSpec& spec, const std::string& client);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace fp4moe
