// RemotePrefill: the step loop's part for decode engines (docs/disaggregation.md). Handles sequences whose
// prompt a prefill node computes.
//
//   request()       sends the prompt; the sequence has a room and stays outside the scheduler
//   take_event()    the first token has arrived; the sequence is then admitted like any other, and awaits its
//                   prompt's pages
//   fetch_pages()   the sequence has pages and, of a model with states, a slot; a thread of the decode node
//   fills
//                   them under a lease
//   take_event()    the pages have arrived; the sequence decodes and leaves its room
//
// A retracted sequence leaves its room, because this engine then computes its prompt.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

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
  Status take_event(Sequence& sequence, KvEvent event, bool is_pending);
  // Call after planning, for every scheduled sequence. Returns true if the sequence can decode now.
  Result<bool> fetch_pages(Sequence& sequence, DpScheduler& scheduler);
  void leave_room(Sequence& sequence);
  // Call while no sequence has a room; works like DecodeNode::set_hello().
  void set_hello(KvHello hello) { node_.set_hello(std::move(hello)); }
  KvTrafficTotals traffic() const { return node_.traffic(); }

 private:
  void start_decoding(Sequence& sequence);

  Executor& executor_;
  const PriorityRules& priorities_;
  DecodeNode node_;
};

}  // namespace fp4moe
