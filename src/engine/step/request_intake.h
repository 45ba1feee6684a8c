// RequestIntake: the part of the step loop that runs on the submitting thread. Checks a request, starts the
// compilation of its grammar, makes its sequence and puts the sequence into the inbox.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "engine/ranks/executor.h"
#include "engine/request_check.h"
#include "engine/schedule/sequence.h"
#include "engine/step/grammar_manager.h"
#include "engine/step/inbox.h"
#include "engine/step/remote_prefill.h"
#include "engine/step/step_loop_options.h"
#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

// Thread-safe.
class RequestIntake {
 public:
  // All arguments are borrowed. grammars is null without a grammar compiler; remote_prefill is null unless
  // this is a decode engine.
  RequestIntake(const Executor& executor, const Tokenizer& tokenizer, const StepLoopOptions& options,
                Inbox& inbox, GrammarManager* grammars, RemotePrefill* remote_prefill);

  // A prefill engine's part of a request (StepLoop::submit_prompt).
  struct Holding {
    std::function<void(FirstToken)> on_held;
    std::shared_ptr<KvLease> pages;
  };
  // holding: empty except on a prefill engine. Returns the request's id.
  Result<std::string> submit(Request request, DeltaCallback on_delta, Holding holding);

 private:
  // The parts that a sequence needs besides its request.
  struct Parts {
    DeltaCallback on_delta;
    Holding holding;
    StopPatterns patterns;
  };
  Status check_prefill_node(const Request& request) const;
  Result<GrammarTicket> compile_grammar(Request& request) const;
  Status ignore_priority();
  std::unique_ptr<Sequence> make_sequence(Request request, uint64_t ordinal, Parts& parts) const;

  const Executor& executor_;
  const Tokenizer& tokenizer_;
  const StepLoopOptions& options_;
  const RequestLimits limits_;
  Inbox& inbox_;
  GrammarManager* const grammars_;
  RemotePrefill* const remote_prefill_;
  std::atomic<bool> warned_of_priority_{false};
};

}  // namespace fp4moe
