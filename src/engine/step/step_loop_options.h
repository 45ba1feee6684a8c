// StepLoopOptions: the settings that StepLoop::make needs besides the model.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/disagg/kv_wire.h"
#include "engine/disagg/node_link.h"
#include "engine/grammar/grammar_store.h"
#include "engine/grammar/output_grammar.h"
#include "engine/schedule/scheduler.h"
#include "engine/step/draft_choice.h"
#include "engine/step/ngram_drafter.h"
#include "engine/step/time_limits.h"
#include "fp4moe/sinks.h"

namespace fp4moe {

struct PriorityRules {
  bool are_used = false;       // otherwise requests are served in order of arrival
  bool low_first = false;      // smaller values first
  bool refuse_unused = false;  // if priorities are not used, refuse requests that have one
};

struct StepLoopOptions {
  SchedulerLimits scheduler;   // over all data-parallel groups
  int64_t context_length = 0;  // maximum tokens of one request, prompt and output; must fit in a group's KV
                               // pool
  int64_t max_queued_requests = 0;
  uint64_t random_seed = 0;  // for requests without a seed
  GrammarLimits grammars;
  MaskLimits masks;
  NgramLimits drafts;
  DraftSource draft_source;          // proposes the drafts instead, at most drafts.max_tokens; empty: n-grams
  double synthetic_acceptance = -1;  // EngineConfig::speculative_synthetic_acceptance
  int64_t max_model_drafts = 0;  // per sequence and step, by the executor's draft model; 0: it drafts nothing
  std::optional<StepCost> adaptive;  // drafts only as far as it pays
  TimeLimits time_limits;
  PriorityRules priorities;
  int64_t rebalance_interval = 0;  // steps between two moves of experts; 0: only on demand
  double watchdog_timeout = 0;     // seconds that one step may take; 0: no watchdog
  // Disaggregation: facts that a prefill node must match; empty: not a decode engine.
  KvHello hello;
  NodeLinkOptions link;

  // Most drafts of a sequence in a step.
  int64_t max_drafts() const { return max_model_drafts > 0 ? max_model_drafts : drafts.max_tokens; }
};

}  // namespace fp4moe
