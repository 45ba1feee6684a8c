#include "engine/request_check.h"

#include <utf8proc.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_set>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr int32_t kMaxTopLogprobs = 20;  // OpenAI's limit
// Of token_ids_logprob, in a prompt: about as many as top_logprobs can return for the longest prompts.
constexpr int64_t kMaxPromptIdLogprobs = 1 << 21;
constexpr float kMaxTemperature = 100;
constexpr size_t kMaxStopBytes = 1024;

// Returns the error "name=value; must be ...".
template <class T>
Status illegal(const std::string& name, T value, const std::string& legal) {
  return invalid_argument(name + "=" + std::to_string(value) + "; must be " + legal);
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

Status check_penalties(const SamplingParams& p) {
  for (const auto& [name, value] :
       {std::pair{"frequency_penalty", p.frequency_penalty}, {"presence_penalty", p.presence_penalty}})
    if (!(value >= -2 && value <= 2)) return illegal(name, value, "between -2 and 2");
  if (!(p.repetition_penalty > 0 && p.repetition_penalty <= 2))
    return illegal("repetition_penalty", p.repetition_penalty, "above 0 and at most 2");
  return {};
}

Status check_logit_bias(const SamplingParams& p, int64_t vocab_size) {
  if (std::ssize(p.logit_bias) > kMaxLogitBiases)
    return illegal("logit_bias: tokens", p.logit_bias.size(), "at most " + std::to_string(kMaxLogitBiases));
  std::unordered_set<int32_t> seen;
  for (const LogitBias& bias : p.logit_bias) {
    const std::string id = std::to_string(bias.token_id), name = "logit_bias[" + id + "]";
    if (bias.token_id < 0 || bias.token_id >= vocab_size)
      return invalid_argument(name + ": token ids must be between 0 and " + std::to_string(vocab_size - 1));
    if (!seen.insert(bias.token_id).second)
      return invalid_argument("logit_bias names token " + id + " twice");
    if (!(bias.bias >= -100 && bias.bias <= 100)) return illegal(name, bias.bias, "between -100 and 100");
  }
  return {};
}

Status check_sampling(const SamplingParams& p) {  // the comparisons fail for NaN
  if (!(p.temperature >= 0 && p.temperature <= kMaxTemperature))
    return illegal("temperature", p.temperature, "between 0 (greedy) and 100");
  if (!(p.top_p > 0 && p.top_p <= 1)) return illegal("top_p", p.top_p, "above 0 and at most 1");
  if (p.top_k != -1 && p.top_k < 1) return illegal("top_k", p.top_k, "-1 (all tokens) or at least 1");
  if (!(p.min_p >= 0 && p.min_p <= 1)) return illegal("min_p", p.min_p, "between 0 and 1");
  FP4MOE_RETURN_IF_ERROR(check_penalties(p));
  if (p.max_new_tokens < 0) return illegal("max_new_tokens", p.max_new_tokens, "at least 0");
  if (p.min_new_tokens < 0 || p.min_new_tokens > p.max_new_tokens)
    return illegal("min_new_tokens", p.min_new_tokens,
                   "between 0 and max_new_tokens=" + std::to_string(p.max_new_tokens));
  if (p.min_new_tokens > 0 && p.grammar.kind != GrammarSpec::Kind::kNone)
    return illegal("min_new_tokens", p.min_new_tokens,
                   "0 if a grammar is set, because the grammar decides where the text ends");
  if (p.top_logprobs < -1 || p.top_logprobs > kMaxTopLogprobs)
    return illegal("top_logprobs", p.top_logprobs,
                   "between -1 (none) and " + std::to_string(kMaxTopLogprobs));
  return {};
}

Status check_logprob_ids(const Request& request, int64_t vocab_size) {
  const std::vector<int32_t>& ids = request.sampling.token_ids_logprob;
  if (ids.empty()) return {};
  if (std::ssize(ids) > SamplingParams::kMaxLogprobIds)
    return illegal("token_ids_logprob: ids", ids.size(),
                   "at most " + std::to_string(SamplingParams::kMaxLogprobIds));
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= vocab_size)
      return illegal("token_ids_logprob[" + std::to_string(i) + "]", ids[i],
                     "between 0 and " + std::to_string(vocab_size - 1) + ", because the vocabulary has " +
                         std::to_string(vocab_size) + " tokens");
  if (request.sampling.top_logprobs < 0)
    return illegal("top_logprobs", request.sampling.top_logprobs, "at least 0 with token_ids_logprob");
  const int64_t num_scored =
      request.prompt_logprobs_from >= 0 ? std::ssize(request.input_ids) - request.prompt_logprobs_from : 0;
  if (num_scored * std::ssize(ids) > kMaxPromptIdLogprobs)
    return illegal("token_ids_logprob: ids", ids.size(),
                   "at most " + std::to_string(kMaxPromptIdLogprobs / num_scored) + " for the " +
                       std::to_string(num_scored) + " prompt tokens whose log-probabilities are requested");
  return {};
}

Status check_texts(const std::string& field, const std::vector<std::string>& texts) {
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string name = field + "[" + std::to_string(i) + "]";
    if (texts[i].empty() || texts[i].size() > kMaxStopBytes)
      return illegal(name + ": bytes", texts[i].size(), "between 1 and " + std::to_string(kMaxStopBytes));
    if (!is_utf8(texts[i])) return invalid_argument(name + " is not valid UTF-8");
  }
  return {};
}

Status check_stops(const SamplingParams& p, int64_t vocab_size) {
  if (std::max(std::ssize(p.stop), std::ssize(p.stop_token_ids)) > kMaxStops)
    return invalid_argument(std::to_string(p.stop.size()) + " stop strings and " +
                            std::to_string(p.stop_token_ids.size()) + " stop_token_ids; at most " +
                            std::to_string(kMaxStops) + " of each are allowed");
  if (std::ssize(p.stop_regex) > kMaxStopRegexes)
    return illegal("stop_regex: expressions", p.stop_regex.size(),
                   "at most " + std::to_string(kMaxStopRegexes));
  FP4MOE_RETURN_IF_ERROR(check_texts("stop", p.stop));
  FP4MOE_RETURN_IF_ERROR(check_texts("stop_regex", p.stop_regex));
  for (size_t i = 0; i < p.stop_token_ids.size(); ++i)
    if (p.stop_token_ids[i] < 0 || p.stop_token_ids[i] >= vocab_size)
      return illegal("stop_token_ids[" + std::to_string(i) + "]", p.stop_token_ids[i],
                     "between 0 and " + std::to_string(vocab_size - 1));
  return {};
}

}  // namespace

Status check_request(const Request& request, const RequestLimits& limits) {
  const std::vector<int32_t>& ids = request.input_ids;
  if (ids.empty()) return invalid_argument("input_ids is empty; it must contain at least one token id");
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= limits.vocab_size)
      return illegal("input_ids[" + std::to_string(i) + "]", ids[i],
                     "between 0 and " + std::to_string(limits.vocab_size - 1));
  FP4MOE_RETURN_IF_ERROR(check_sampling(request.sampling));
  FP4MOE_RETURN_IF_ERROR(check_logit_bias(request.sampling, limits.vocab_size));
  FP4MOE_RETURN_IF_ERROR(check_stops(request.sampling, limits.vocab_size));
  if (!(request.timeout_seconds >= 0))  // also refuses NaN
    return illegal("timeout", request.timeout_seconds, "at least 0 seconds (0: no limit)");

  const int64_t num_ids = static_cast<int64_t>(ids.size());
  if (request.prompt_logprobs_from < -1 || request.prompt_logprobs_from > num_ids)
    return illegal("prompt_logprobs_from", request.prompt_logprobs_from,
                   "between -1 (none) and " + std::to_string(num_ids) + ", the number of prompt tokens");
  if (request.routed_experts_from < -1 || request.routed_experts_from > num_ids)
    return illegal("routed_experts_from", request.routed_experts_from,
                   "between -1 (none) and " + std::to_string(num_ids) + ", the number of prompt tokens");
  if (request.priority && (*request.priority < -kMaxPriority || *request.priority > kMaxPriority))
    return illegal("priority", *request.priority,
                   std::to_string(-kMaxPriority) + " to " + std::to_string(kMaxPriority));
  if (request.prompt_logprobs_from >= 0 && request.sampling.top_logprobs < 0)
    return illegal("top_logprobs", request.sampling.top_logprobs,
                   "at least 0 if the prompt's logprobs are requested");

  FP4MOE_RETURN_IF_ERROR(check_logprob_ids(request, limits.vocab_size));

  const int64_t num_needed = static_cast<int64_t>(ids.size()) + (request.sampling.max_new_tokens > 0 ? 1 : 0);
  if (num_needed > limits.context_length)
    return does_not_fit("This model's maximum context length is " + std::to_string(limits.context_length) +
                        " tokens (prompt and output together), but the prompt has " +
                        std::to_string(ids.size()) + " tokens");
  return {};
}

}  // namespace fp4moe
