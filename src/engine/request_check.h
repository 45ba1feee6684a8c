// What a request must satisfy before it is queued.
#pragma once

#include <cstdint>

#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr int64_t kMaxLogitBiases = 1024;  // of one request
constexpr int64_t kMaxStops = 64;          // of one request: stop strings, and also stop_token_ids
constexpr int64_t kMaxStopRegexes = 16;    // of one request
constexpr int64_t kMaxPriority = 2147483647;

struct RequestLimits {
  int64_t vocab_size = 0;      // V
  int64_t context_length = 0;  // tokens of prompt and answer
};

// kInvalidArgument names the field, its value and what would be legal; kDoesNotFit (the context has
// no room for the prompt and one token of answer) names both numbers.
Status check_request(const Request& request, const RequestLimits& limits);

}  // namespace fp4moe
