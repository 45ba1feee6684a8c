#include "engine/step/prompt_pages.h"

#include <algorithm>

namespace fp4moe {

void PromptPages::stage(const DpScheduler& scheduler) {
  staged_.clear();
  if (!executor_.steps_complete_pages()) return;
  for (int group = 0; group < scheduler.num_groups(); ++group)
    for (const ScheduledRows& rows : scheduler.step(group)) {
      const Sequence& sequence = *rows.sequence;
      if (!sequence.disagg.on_held) continue;
      KvLease& lease = *sequence.disagg.lease;
      const SequenceKv& kv = sequence.kv;
      const int64_t num_complete = kv.num_cached / executor_.page_size();
      const int64_t num_parts = std::min(num_complete, lease.shape().num_parts() - 1);
      if (num_parts <= lease.num_open().value_or(num_parts)) continue;
      lease.stage({group, kv.tables, kv.slot}, num_parts);
      staged_.push_back(sequence.disagg.lease);
    }
  if (executor_.samples()) return;
  for (const auto& lease : staged_) lease->open_staged();
  staged_.clear();
}

Status PromptPages::open_staged() {
  if (staged_.empty()) return {};
  FP4MOE_RETURN_IF_ERROR(executor_.finish_steps_before_last());
  for (const auto& lease : staged_) lease->open_staged();
  staged_.clear();
  return {};
}

}  // namespace fp4moe
