#include "engine/step/remote_prefill.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"

namespace fp4moe {
namespace {

DecodeNodeOptions node_options(const Executor& executor, const StepLoopOptions& options) {
  const int64_t page_bytes =
      executor.page_size() * (executor.kv_token_bytes() + executor.window_token_bytes());
  const int64_t part_bytes = std::max(page_bytes, std::min(executor.state_bytes(), kKvStatePieceBytes));
  return {.hello = options.hello,
          .max_page_bytes = int64_t{sizeof(KvPageHeader)} + part_bytes,
          .link = options.link};
}

}  // namespace

RemotePrefill::RemotePrefill(Executor& executor, const StepLoopOptions& options,
                             std::function<void(KvEvent)> on_event)
    : executor_(executor),
      priorities_(options.priorities),
      node_(node_options(executor, options), std::move(on_event)) {}

// Sends the seed, so that both engines together choose the tokens that one engine would choose. Scores of the
// prompt arrive with the first token.
Status RemotePrefill::request(Sequence& sequence) {
  if (sequence.is_over()) {
    sequence.disagg.prefill_node.clear();
    return {};
  }
  Request request{.id = sequence.id,
                  .input_ids = sequence.token_ids,
                  .sampling = sequence.request.sampling,
                  .client = sequence.request.client,
                  .routed_experts_from = sequence.experts.from,
                  .prefill_node = sequence.disagg.prefill_node};
  request.sampling.seed = sequence.request.seed;
  if (sequence.scores.first_reported < sequence.num_prompt_tokens)
    request.prompt_logprobs_from = sequence.scores.first_reported - 1;
  const int64_t priority = sequence.request.priority;
  if (priorities_.are_used && priority != std::numeric_limits<int64_t>::min())
    request.priority = priorities_.low_first ? -priority : priority;
  sequence.scores.next = sequence.scores.end;
  sequence.scores.num_due = 0;
  FP4MOE_ASSIGN_OR_RETURN(sequence.disagg.room, node_.ask(request));
  sequence.disagg.may_reserve = can_come_early(sequence);
  return {};
}

bool RemotePrefill::can_come_early(const Sequence& sequence) const {
  return sequence.max_tokens > sequence.num_prompt_tokens && executor_.steps_complete_pages();
}

Status RemotePrefill::take_event(Sequence& sequence, KvEvent event, bool is_pending, DpScheduler& scheduler) {
  if (event.kind == KvEvent::Kind::kFirstToken) {
    if (!is_pending || sequence.disagg.first_token) return {};
    const int32_t id = event.first.token.token_id;
    const int64_t vocab_size = executor_.config().vocab_size;
    if (id < 0 || id >= vocab_size)
      return data_loss("prefill node " + sequence.disagg.prefill_node + ": token " + std::to_string(id) +
                       " is outside the vocabulary of " + std::to_string(vocab_size));
    sequence.disagg.first_token = std::move(event.first);
    return {};
  }
  if (!is_pending && !sequence.disagg.awaits_pages) return {};
  if (event.kind == KvEvent::Kind::kFailed) return event.status;
  if (event.pages == sequence.disagg.lease)
    start_decoding(sequence);
  else
    compute_here(sequence, scheduler);
  return {};
}

Result<bool> RemotePrefill::fetch_pages(std::span<const std::unique_ptr<Sequence>> pending,
                                        DpScheduler& scheduler) {
  bool can_any_decode = false;
  listed_.clear();
  scheduler.list(listed_);
  for (Sequence* sequence : listed_) {
    FP4MOE_ASSIGN_OR_RETURN(const bool can_decode, fetch(*sequence, scheduler));
    can_any_decode = can_any_decode || can_decode;
  }
  for (const auto& sequence : pending)
    if (std::exchange(sequence->disagg.may_reserve, false))
      FP4MOE_RETURN_IF_ERROR(reserve(*sequence, scheduler));
  return can_any_decode;
}

// Once per sequence: if there are no pages to spare, it gets them after the first token.
Status RemotePrefill::reserve(Sequence& sequence, DpScheduler& scheduler) {
  SequenceDisagg& disagg = sequence.disagg;
  if (disagg.room == 0 || disagg.first_token) return {};
  disagg.awaits_pages = true;
  if (!scheduler.reserve(sequence)) {
    disagg.awaits_pages = false;
    return {};
  }
  return sequence.kv.num_cached < sequence.num_prompt_tokens ? take(sequence, scheduler) : Status();
}

Result<bool> RemotePrefill::fetch(Sequence& sequence, DpScheduler& scheduler) {
  SequenceDisagg& disagg = sequence.disagg;
  if (disagg.room == 0) return false;
  if (!disagg.awaits_pages) {  // retracted, or it has reserved pages that hold the whole prompt
    leave_room(sequence);
    return false;
  }
  const SequenceKv& kv = sequence.kv;
  if (disagg.lease != nullptr || kv.tables.full.empty()) return false;
  if (kv.num_cached >= sequence.num_prompt_tokens) {
    start_decoding(sequence);
    return true;
  }
  FP4MOE_RETURN_IF_ERROR(take(sequence, scheduler));
  return false;
}

// Requests the pages after the published ones, which this engine already has, and the state. Finishes the
// steps in flight first, because they may still write to pages or a slot that belonged to an ended request
// and now belong to this one. So may copies of slots that were planned before the slot was allocated.
Status RemotePrefill::take(Sequence& sequence, DpScheduler& scheduler) {
  const SequenceKv& kv = sequence.kv;
  if (const std::vector<StateCopy> copies = scheduler.take_state_copies(kv.group); !copies.empty())
    FP4MOE_RETURN_IF_ERROR(executor_.copy_states(kv.group, copies));
  FP4MOE_RETURN_IF_ERROR(executor_.finish_steps());
  sequence.disagg.lease =
      std::make_shared<KvLease>(executor_, KvPlace{kv.group, kv.tables, kv.slot}, sequence.num_prompt_tokens);
  node_.take(sequence.disagg.room, sequence.disagg.lease, kv.num_published_pages);
  return {};
}

void RemotePrefill::start_decoding(Sequence& sequence) {
  if (sequence.disagg.lease != nullptr) std::exchange(sequence.disagg.lease, nullptr)->end();
  sequence.kv.num_cached = sequence.num_prompt_tokens;
  if (executor_.draft_shape().takes_features) sequence.draft.num_cached = sequence.num_prompt_tokens;
  sequence.disagg.awaits_pages = false;
  leave_room(sequence);
}

// The sequence gets other pages, because a prompt's first window pages are not among those that it has.
void RemotePrefill::compute_here(Sequence& sequence, DpScheduler& scheduler) {
  leave_room(sequence);
  scheduler.retract(sequence);
  sequence.disagg.awaits_pages = false;
}

void RemotePrefill::leave_room(Sequence& sequence) {
  if (sequence.disagg.room != 0) node_.release(std::exchange(sequence.disagg.room, 0));
}

}  // namespace fp4moe
