// The step loop's part in prefill-decode disaggregation (docs/disaggregation.md).
//
// A prefill engine's prompt runs like any other request until its first token is chosen; then it is held. A
// decode engine's request waits outside the scheduler for that token. It is then admitted like any other;
// another thread fills its prompt's pages, after which it decodes.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "base/check.h"
#include "engine/step/step_loop.h"

namespace fp4moe {

void StepLoop::make_decode_node() {
  const int64_t max_page_bytes =
      int64_t{sizeof(KvPageHeader)} + executor_.page_size() * executor_.kv_token_bytes();
  DecodeNodeOptions options{.hello = options_.hello, .max_page_bytes = max_page_bytes, .link = options_.link};
  decode_node_ = std::make_unique<DecodeNode>(std::move(options), [this](KvEvent event) {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    inbox_changed_.notify_one();
  });
}

// ---- a prefill engine -----------------------------------------------------------------------------

void StepLoop::hold(SampledRow& row) {
  Sequence& sequence = *row.sequence;
  sequence.token_ids[static_cast<size_t>(sequence.num_known_tokens())] = row.token.token_id;
  --sequence.num_unknown;
  ++totals_.generation_tokens_total;
  FP4MOE_CHECK(scheduler_.hold(sequence), "prompt " + sequence.id + " is not running");
  leave_grammar(sequence);
  sequence.times.held = Clock::now();
  sequence.disagg.lease = std::make_shared<KvLease>(executor_, sequence.kv.group, sequence.kv.page_table,
                                                    sequence.num_prompt_tokens);
  sequence.disagg.on_held({{.token = std::move(row.token),
                            .experts = std::move(sequence.experts.ids),
                            .cached_tokens = sequence.kv.num_reused},
                           sequence.disagg.lease});
}

// ---- a decode engine ------------------------------------------------------------------------------

// Sends the seed, so that the tokens are chosen as if by one engine. Scores of the prompt arrive with the
// first token.
void StepLoop::ask_prefill_node(Sequence& sequence) {
  if (sequence.is_over()) return sequence.disagg.prefill_node.clear();  // there is nothing to compute
  Request request{.id = sequence.id,
                  .input_ids = sequence.token_ids,
                  .sampling = sequence.request.sampling,
                  .client = sequence.request.client,
                  .routed_experts_from = sequence.experts.from,
                  .prefill_node = sequence.disagg.prefill_node};
  request.sampling.seed = sequence.request.seed;
  if (sequence.scores.first_reported < sequence.num_prompt_tokens)
    request.prompt_logprobs_from = sequence.scores.first_reported - 1;
  const PriorityRules& priorities = options_.priorities;
  if (priorities.are_used && sequence.request.priority != std::numeric_limits<int64_t>::min())
    request.priority = priorities.low_first ? -sequence.request.priority : sequence.request.priority;
  sequence.scores.next = sequence.num_prompt_tokens;
  sequence.scores.num_due = 0;
  const Result<uint64_t> room = decode_node_->ask(request);
  if (room.ok())
    sequence.disagg.room = *room;
  else
    take_event({.id = sequence.id, .status = room.status()});
}

// Ignore events for finished requests and abandoned rooms.
void StepLoop::take_event(KvEvent event) {
  const auto is_meant = [&](const Sequence& s) { return s.id == event.id && s.disagg.room == event.room; };
  const auto waiting = std::ranges::find_if(compiling_, [&](const auto& s) { return is_meant(*s); });
  const bool is_waiting = waiting != compiling_.end();
  Sequence* sequence = is_waiting ? waiting->get() : scheduler_.find(event.id);
  if (sequence == nullptr || !is_meant(*sequence)) return;
  if (event.kind == KvEvent::Kind::kFirstToken) {
    if (!is_waiting || sequence->disagg.first_token) return;
    const int32_t id = event.first.token.token_id;
    if (id >= 0 && id < request_limits_.vocab_size) {
      sequence->disagg.first_token = std::move(event.first);
      return;
    }
    event.status =
        data_loss("prefill node " + sequence->disagg.prefill_node + ": token " + std::to_string(id) +
                  " is outside the vocabulary of " + std::to_string(request_limits_.vocab_size));
  }
  if (!is_waiting && !sequence->disagg.awaits_pages) return;
  if (event.kind == KvEvent::Kind::kArrived) return start_decoding(*sequence);
  end(*find(event.id), {.finish_reason = FinishReason::kError,
                        .error = event.status.message(),
                        .error_code = event.status.code()});
}

void StepLoop::take_first_token(Sequence& sequence) {
  FirstToken& first = *sequence.disagg.first_token;
  sequence.kv.num_reused = std::clamp<int64_t>(first.cached_tokens, 0, sequence.num_prompt_tokens);
  sequence.times.started = Clock::now();
  Delta scores;
  sequence.experts.ids = std::move(first.experts);
  for (SampledToken& token : first.scored) scores.prompt_logprobs.push_back(logprobs_of(token));
  if (sequence.is_over()) {  // no output is requested: experts of the last row are not reported
    const int64_t num_rows = std::max<int64_t>(0, sequence.num_prompt_tokens - 1 - sequence.experts.from);
    const int64_t num_experts = num_rows * executor_.config().num_layers * executor_.config().top_k;
    sequence.experts.ids.resize(std::min(sequence.experts.ids.size(), static_cast<size_t>(num_experts)));
    count_prompt(sequence);
    scores.finish_reason = FinishReason::kLength;
    return end(sequence, std::move(scores));
  }
  if (!first.scored.empty()) deliver(sequence, scores);
  sequence.token_ids.push_back(0);
  sequence.num_unknown = 1;
  sequence.disagg.awaits_pages = true;
  SampledRow row{&sequence, std::move(first.token), {}, {}};
  accept(row);
}

// For admitted sequences; those that were retracted leave their room, as this engine computes them now.
void StepLoop::take_all_pages() {
  listed_.clear();
  scheduler_.list(listed_);
  for (Sequence* sequence : listed_) {
    if (sequence->disagg.room == 0) continue;
    if (!sequence->disagg.awaits_pages)
      leave_room(*sequence);
    else if (sequence->disagg.lease == nullptr && !sequence->kv.page_table.empty())
      take_pages(*sequence);
  }
}

// Requests the pages after the published ones, which this engine has already. A step in flight may still
// write to pages that belonged to a request that has ended and now belong to this one.
void StepLoop::take_pages(Sequence& sequence) {
  if (sequence.kv.num_cached >= sequence.num_prompt_tokens) return start_decoding(sequence);
  if (const Status status = executor_.finish_steps(); !status.ok())
    throw std::runtime_error(status.message());
  sequence.disagg.lease = std::make_shared<KvLease>(executor_, sequence.kv.group, sequence.kv.page_table,
                                                    sequence.num_prompt_tokens);
  decode_node_->take(sequence.disagg.room, sequence.disagg.lease, sequence.kv.num_published_pages);
}

void StepLoop::start_decoding(Sequence& sequence) {
  if (sequence.disagg.lease != nullptr) std::exchange(sequence.disagg.lease, nullptr)->end();
  sequence.kv.num_cached = sequence.num_prompt_tokens;
  sequence.disagg.awaits_pages = false;
  is_stalled_ = false;
  leave_room(sequence);
}

void StepLoop::leave_room(Sequence& sequence) {
  if (sequence.disagg.room != 0) decode_node_->release(std::exchange(sequence.disagg.room, 0));
}

void StepLoop::count_awaited() {
  if (decode_node_ == nullptr) return;
  totals_.kv_transfer_bytes_total = decode_node_->page_bytes_received();
  totals_.num_awaited_reqs = std::ranges::count_if(
      compiling_, [](const auto& s) { return !s->disagg.prefill_node.empty() && !s->disagg.first_token; });
  listed_.clear();
  scheduler_.list(listed_);
  totals_.num_transferring_reqs =
      std::ranges::count_if(listed_, [](const Sequence* s) { return s->disagg.awaits_pages; });
}

}  // namespace fp4moe
