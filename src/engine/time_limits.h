// TimeLimits: how long requests may wait and run.
#pragma once

#include "engine/sequence.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Seconds; 0: no limit.
struct TimeLimits {
  double waiting = 0;  // until its first rows are computed
  double running = 0;  // from then on
  double held = 0;     // a prefill engine's, until its pages are released
};

// OK, or why the request is over: kUnavailable if it was not begun, else kDeadline.
Status check_time(const Sequence& sequence, const TimeLimits& limits, Sequence::Clock::time_point now);

}  // namespace fp4moe
