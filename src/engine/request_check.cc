#include "engine/request_check.h"

#include <utf8proc.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr int32_t kMaxTopLogprobs = 20;  // OpenAI's limit
constexpr float kMaxTemperature = 100;
constexpr size_t kMaxStops = 64;  // of either kind
constexpr size_t kMaxStopBytes = 1024;

// "name=value; legal: what".
template <class T>
Status illegal(const std::string& name, T value, const std::string& legal) {
  return invalid_argument(name + "=" + std::to_string(value) + "; legal: " + legal);
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    utf8proc_int32_t codepoint;
    const auto num_bytes = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                            static_cast<utf8proc_ssize_t>(text.size()), &codepoint);
    if (num_bytes <= 0) return false;
    text.remove_prefix(static_cast<size_t>(num_bytes));
  }
  return true;
}

Status check_sampling(const SamplingParams& p) {  // written so that NaN fails
  if (!(p.temperature >= 0 && p.temperature <= kMaxTemperature))
    return illegal("temperature", p.temperature, "0 (greedy) to 100");
  if (!(p.top_p > 0 && p.top_p <= 1)) return illegal("top_p", p.top_p, "above 0, at most 1");
  if (p.top_k != -1 && p.top_k < 1) return illegal("top_k", p.top_k, "-1 (all tokens) or at least 1");
  if (p.max_new_tokens < 0) return illegal("max_new_tokens", p.max_new_tokens, "at least 0");
  if (p.top_logprobs < -1 || p.top_logprobs > kMaxTopLogprobs)
    return illegal("top_logprobs", p.top_logprobs, "-1 (none) to " + std::to_string(kMaxTopLogprobs));
  return {};
}

Status check_stops(const SamplingParams& p, int64_t vocab_size) {
  if (std::max(p.stop.size(), p.stop_token_ids.size()) > kMaxStops)
    return invalid_argument(std::to_string(p.stop.size()) + " stop strings and " +
                            std::to_string(p.stop_token_ids.size()) + " stop_token_ids; legal: at most " +
                            std::to_string(kMaxStops) + " of each");
  for (size_t i = 0; i < p.stop.size(); ++i) {
    const std::string name = "stop[" + std::to_string(i) + "]";
    if (p.stop[i].empty() || p.stop[i].size() > kMaxStopBytes)
      return illegal(name + ": bytes", p.stop[i].size(), "1 to " + std::to_string(kMaxStopBytes));
    if (!is_utf8(p.stop[i])) return invalid_argument(name + " is not valid UTF-8");
  }
  for (size_t i = 0; i < p.stop_token_ids.size(); ++i)
    if (p.stop_token_ids[i] < 0 || p.stop_token_ids[i] >= vocab_size)
      return illegal("stop_token_ids[" + std::to_string(i) + "]", p.stop_token_ids[i],
                     "0 to " + std::to_string(vocab_size - 1));
  return {};
}

}  // namespace

Status check_request(const Request& request, const RequestLimits& limits) {
  const std::vector<int32_t>& ids = request.input_ids;
  if (ids.empty()) return invalid_argument("input_ids is empty; legal: at least one token id");
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= limits.vocab_size)
      return illegal("input_ids[" + std::to_string(i) + "]", ids[i],
                     "0 to " + std::to_string(limits.vocab_size - 1));
  FP4MOE_RETURN_IF_ERROR(check_sampling(request.sampling));
  FP4MOE_RETURN_IF_ERROR(check_stops(request.sampling, limits.vocab_size));

  const int64_t num_needed = static_cast<int64_t>(ids.size()) + (request.sampling.max_new_tokens > 0 ? 1 : 0);
  if (num_needed > limits.context_length)
    return does_not_fit("the prompt has " + std::to_string(ids.size()) + " tokens, the context holds " +
                        std::to_string(limits.context_length) + " of prompt and answer together");
  return {};
}

}  // namespace fp4moe
