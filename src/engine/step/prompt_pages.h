// PromptPages: opens the pages of a prefill engine's prompts to other threads as steps compute them, so that
// they are sent while the rest of their prompt is computed (docs/disaggregation.md).
#pragma once

#include <memory>
#include <vector>

#include "engine/disagg/kv_lease.h"
#include "engine/ranks/executor.h"
#include "engine/schedule/dp_scheduler.h"

namespace fp4moe {

// The last part of a prompt stays closed until Delivery holds the prompt, so that the first token is sent
// before it. So do all parts if the draft model's pages follow those of the target, which it computes later,
// or if the model has states.
//
// Used by the loop's thread only.
class PromptPages {
 public:
  explicit PromptPages(Executor& executor) : executor_(executor) {}

  // Call after planning a step, before it runs: opens the pages that are complete without it. If the step
  // before may be in flight, open_staged() does that.
  void stage(const DpScheduler& scheduler);
  // Call when the planned step has been enqueued: waits for the step before if that has computed such pages.
  Status open_staged();

 private:
  Executor& executor_;
  std::vector<std::shared_ptr<KvLease>> staged_;
};

}  // namespace fp4moe
