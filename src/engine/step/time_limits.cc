#include "engine/step/time_limits.h"

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
  if (sequence.times.held != Sequence::Clock::time_point())
    return is_over(sequence.times.held, limits.held)
               ? unavailable("its KV pages were held for --disaggregation-timeout " +
                             seconds_text(limits.held) + " but not fetched")
               : Status();
  const bool has_started = sequence.has_started();
  if (is_over(sequence.times.submitted, sequence.request.timeout_seconds))
    return {StatusCode::kDeadline,
            "the request's timeout of " + seconds_text(sequence.request.timeout_seconds) +
                " has expired; it has " + std::to_string(sequence.num_output_tokens()) + " output tokens"};
  if (!has_started && is_over(sequence.times.submitted, limits.waiting))
    return unavailable("the request has waited longer than --req-waiting-timeout " +
                       seconds_text(limits.waiting));
  if (has_started && is_over(sequence.times.started, limits.running))
    return {StatusCode::kDeadline, "the request has run longer than --req-running-timeout " +
                                       seconds_text(limits.running) + "; it has " +
                                       std::to_string(sequence.num_output_tokens()) + " output tokens"};
  return {};
}

}  // namespace fp4moe
