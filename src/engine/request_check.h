// Validates a request before it is queued.
#pragma once

#include <cstdint>

#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr int64_t kMaxLogitBiases = 1024;  // per request
constexpr int64_t kMaxStops = 64;          // per request; for stop strings, and for stop_token_ids
constexpr int64_t kMaxStopRegexes = 16;    // per request
constexpr int64_t kMaxPriority = 2147483647;

struct RequestLimits {
  int64_t vocab_size = 0;      // V
  int64_t context_length = 0;  // tokens of prompt and output together
};

// kInvalidArgument names the field, its value and the allowed values; kDoesNotFit (the context cannot hold
// the prompt and one output token) names the length of the context and of the prompt.
Status check_request(const Request& request, const RequestLimits& limits);

}  // namespace fp4moe
