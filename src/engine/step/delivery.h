// Delivery: handles a row's token or score once it is known: extends the text, checks the stop conditions,
// sends a delta to the client, and ends sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/ranks/executor.h"
#include "engine/schedule/dp_scheduler.h"
#include "engine/step/drafter.h"
#include "engine/step/grammar_manager.h"
#include "engine/step/inbox.h"
#include "engine/step/remote_prefill.h"
#include "engine/step/step_rows.h"
#include "fp4moe/engine.h"
#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

// The parts of the step loop that Delivery uses; all are borrowed.
struct DeliveryParts {
  Executor& executor;
  const Tokenizer& tokenizer;
  DpScheduler& scheduler;
  StepRows& rows;
  Inbox& inbox;
  EngineStats& totals;
  GrammarManager* grammars = nullptr;       // null without a grammar compiler
  RemotePrefill* remote_prefill = nullptr;  // null unless this is a decode engine
  Drafter* drafter = nullptr;               // null without speculative decoding
};

// Used by the loop's thread only.
class Delivery {
 public:
  explicit Delivery(const DeliveryParts& parts) : parts_(parts) {}

  // Accepts the rows' tokens and scores in order. Rows without a sequence are skipped.
  void take_rows(std::span<LogitRow> rows);
  // Gives a decode engine's scheduled sequence the token that the prefill node chose; the sequence then
  // awaits its prompt's pages, unless it has them or has left its room.
  void take_first_token(Sequence& sequence);
  // Call after drafter.draft(), with its status: a prompt held before is complete with it, so that its pages
  // can be read.
  void open_held_pages(const Status& drafted);
  // Delivers the last delta with the remaining text, and deletes the sequence, which must be scheduled.
  void end(Sequence& sequence, Delta delta);
  void fail(Sequence& sequence, const Status& status);

 private:
  void accept(LogitRow& row, bool is_last);
  void take_scores(std::span<LogitRow> rows);
  void hold(LogitRow& row);
  Delta put_token(Sequence& sequence, SampledToken& token) const;
  PositionLogprobs logprobs_of(SampledToken& token) const;
  PositionLogprobs next_logprobs_of(SampledToken& token) const;
  void deliver(const Sequence& sequence, Delta& delta);
  void count_prompt(const Sequence& sequence);
  void count_drafts(Sequence& sequence, const LogitRow& row);
  void count_end(const Delta& delta);

  const DeliveryParts parts_;
  std::vector<std::shared_ptr<KvLease>> closed_;  // of held prompts whose last rows the drafter extends
};

}  // namespace fp4moe
