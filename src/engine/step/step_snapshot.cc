#include "engine/step/step_snapshot.h"

#include <algorithm>

namespace fp4moe {

void StepSnapshot::take(const DpScheduler& scheduler) {
  std::lock_guard lock(mutex_);
  ++step_;
  size_t n = 0;  // entries are reused so that the strings keep their memory
  num_rows_ = 0;
  for (int group = 0; group < scheduler.num_groups(); ++group) {
    for (const ScheduledRows& rows : scheduler.step(group)) {
      if (n == requests_.size()) requests_.emplace_back();
      const Sequence& s = *rows.sequence;
      Request& request = requests_[n++];
      request.id.assign(s.id);
      request.group = group;
      request.num_prompt_tokens = s.num_prompt_tokens;
      request.num_tokens = s.num_tokens();
      request.num_cached = s.kv.num_cached;
      request.num_rows = rows.num_rows + rows.num_drafts;
      num_rows_ += request.num_rows;
    }
  }
  requests_.resize(n);
  num_running_ = scheduler.num_running();
  num_waiting_ = scheduler.num_waiting();
  num_used_pages_ = scheduler.num_used_pages();
  num_cached_pages_ = scheduler.num_cached_pages();
  num_free_pages_ = scheduler.num_free_pages();
}

std::vector<std::string> StepSnapshot::lines() const {
  constexpr size_t kMostShown = 32;
  const auto text = [](int64_t n) { return std::to_string(n); };
  std::lock_guard lock(mutex_);
  std::vector<std::string> lines = {
      "step " + std::to_string(step_) + ": " + text(num_rows_) + " rows of " +
          std::to_string(requests_.size()) + " requests; " + text(num_running_) + " running, " +
          text(num_waiting_) + " waiting",
      "KV pages: " + text(num_used_pages_) + " used, " + text(num_cached_pages_) + " cached, " +
          text(num_free_pages_) + " free",
  };
  for (size_t i = 0; i < std::min(requests_.size(), kMostShown); ++i) {
    const Request& r = requests_[i];
    lines.push_back("request " + r.id + " (group " + std::to_string(r.group) + "): prompt " +
                    text(r.num_prompt_tokens) + ", tokens " + text(r.num_tokens) + ", computed " +
                    text(r.num_cached) + ", rows in the step " + text(r.num_rows));
  }
  if (requests_.size() > kMostShown)
    lines.push_back("and " + std::to_string(requests_.size() - kMostShown) + " more requests");
  return lines;
}

}  // namespace fp4moe
