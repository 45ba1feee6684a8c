// StepSnapshot: a snapshot of the current step, for diagnosing a step that does not end.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "engine/schedule/dp_scheduler.h"

namespace fp4moe {

class StepSnapshot {
 public:
  // Called by the engine's thread once the step is planned.
  void take(const DpScheduler& scheduler);
  // Returns lines that describe the latest step: its requests, the queue and the pages. Thread-safe.
  std::vector<std::string> lines() const;

 private:
  struct Request {
    std::string id;
    int group = 0;
    int64_t num_prompt_tokens = 0, num_tokens = 0, num_cached = 0, num_rows = 0;
  };
  mutable std::mutex mutex_;
  uint64_t step_ = 0;  // counts from 1
  std::vector<Request> requests_;
  int64_t num_rows_ = 0, num_running_ = 0, num_waiting_ = 0;
  int64_t num_used_pages_ = 0, num_cached_pages_ = 0, num_free_pages_ = 0;
};

}  // namespace fp4moe
