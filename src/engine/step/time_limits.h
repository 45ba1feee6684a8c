// TimeLimits: how long requests may wait and run.
#pragma once

#include "engine/schedule/sequence.h"
#include "fp4moe/status.h"

namespace fp4moe {

// In seconds; 0: no limit.
struct TimeLimits {
  double waiting = 0;  // from submission until its first rows are scheduled
  double running = 0;  // after that
  double held = 0;     // prefill engine: until its pages are released
};

// Returns OK, or why the request has to end. kDeadline: its own timeout or limits.running; kUnavailable:
// limits.waiting or limits.held.
Status check_time(const Sequence& sequence, const TimeLimits& limits, Sequence::Clock::time_point now);

}  // namespace fp4moe
