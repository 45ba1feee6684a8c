// RemotePrefill: the step loop's part for decode engines (docs/disaggregation.md). Handles sequences whose
// prompt a prefill node computes.
//
//   request()       sends the prompt; the sequence has a room and stays outside the scheduler
//   fetch_pages()   the sequence reserves pages if the scheduler has some to spare; a thread of the decode
//                   node fills them under a lease while the prefill node computes the prompt
//   take_event()    the first token has arrived; without pages, the sequence is then admitted like any other
//   fetch_pages()   the sequence has pages by now and, of a model with states, a slot, which are filled too
//   take_event()    the pages have arrived, perhaps before the sequence's grammar is compiled; the sequence
//                   decodes and leaves its room
//
// A sequence whose reserved pages the scheduler takes back fetches them again when it has been admitted. A
// retracted sequence leaves its room, because this engine then computes its prompt. So does one whose pages
// were taken back when all had arrived, because the prefill node then has released them.
//
// Models with states, and drafts that take features, reserve nothing: what they need is complete only after
// the first token.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/disagg/decode_node.h"
#include "engine/ranks/executor.h"
#include "engine/schedule/dp_scheduler.h"
#include "engine/schedule/sequence.h"
#include "engine/step/step_loop_options.h"

namespace fp4moe {

// Used by the loop's thread only, except check().
class RemotePrefill {
 public:
  // The executor and the options are borrowed. on_event is called on the decode node's threads.
  RemotePrefill(Executor& executor, const StepLoopOptions& options, std::function<void(KvEvent)> on_event);

  // Callable from any thread; works like DecodeNode::check().
  Status check(const std::string& prefill_node) const { return node_.check(prefill_node); }
  // Sends the prompt to the prefill node; errors are those of DecodeNode::ask(). If there is nothing to
  // compute, only clears disagg.prefill_node.
  Status request(Sequence& sequence);
  // Handles an event of the sequence's room; is_pending: the sequence is not yet scheduled. Returns an error
  // if the request has to end.
  Status take_event(Sequence& sequence, KvEvent event, bool is_pending, DpScheduler& scheduler);
  // Call after planning: requests the pages of scheduled sequences that have been admitted, and of pending
  // ones that can reserve theirs. Returns whether any scheduled sequence can decode now that had no rows.
  Result<bool> fetch_pages(std::span<const std::unique_ptr<Sequence>> pending, DpScheduler& scheduler);
  void leave_room(Sequence& sequence);
  // Call while no sequence has a room; works like DecodeNode::set_hello().
  void set_hello(KvHello hello) { node_.set_hello(std::move(hello)); }
  KvTrafficTotals traffic() const { return node_.traffic(); }

 private:
  bool can_come_early(const Sequence& sequence) const;
  Status reserve(Sequence& sequence, DpScheduler& scheduler);
  Result<bool> fetch(Sequence& sequence, DpScheduler& scheduler);
  Status take(Sequence& sequence, DpScheduler& scheduler);
  void start_decoding(Sequence& sequence);
  void compute_here(Sequence& sequence, DpScheduler& scheduler);

  Executor& executor_;
  const PriorityRules& priorities_;
  DecodeNode node_;
  std::vector<Sequence*> listed_;
};

}  // namespace fp4moe
