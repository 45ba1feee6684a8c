#include "engine/time_limits.h"

#include <cstdio>
#include <string>

namespace fp4moe {
namespace {

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

}  // namespace

Status check_time(const Sequence& sequence, const TimeLimits& limits, Sequence::Clock::time_point now) {
  const auto is_over = [now](Sequence::Clock::time_point since, double limit) {
    return limit > 0 && std::chrono::duration<double>(now - since).count() > limit;
  };
  if (sequence.held != Sequence::Clock::time_point())
    return is_over(sequence.held, limits.held)
               ? unavailable("its KV pages were held for --disaggregation-timeout " +
                             seconds_text(limits.held) + " and not taken")
               : Status();
  const bool has_started = sequence.has_started();
  if (is_over(sequence.submitted, sequence.timeout_seconds))
    return {StatusCode::kDeadline, "the request's timeout of " + seconds_text(sequence.timeout_seconds) +
                                       " is over; it has " + std::to_string(sequence.num_answer_tokens()) +
                                       " tokens of its answer"};
  if (!has_started && is_over(sequence.submitted, limits.waiting))
    return unavailable("the request has waited for --req-waiting-timeout " + seconds_text(limits.waiting));
  if (has_started && is_over(sequence.started, limits.running))
    return {StatusCode::kDeadline,
            "the request has run for --req-running-timeout " + seconds_text(limits.running) + "; it has " +
                std::to_string(sequence.num_answer_tokens()) + " tokens of its answer"};
  return {};
}

}  // namespace fp4moe
