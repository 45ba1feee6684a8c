#include "server/api/apis.h"

#include <algorithm>
#include <random>
#include <span>

#include "server/api/foreign_fields.h"

namespace fp4moe {

namespace {

constexpr int64_t kMaxChoices = 128;              // per prompt
constexpr size_t kMaxSubmissions = 1024;          // per HTTP request
constexpr int64_t kMaxSubmittedTokens = 1 << 24;  // all prompts of one HTTP request, each counted n times
constexpr size_t kMaxStops = 64;
constexpr size_t kMaxLogitBiases = 1024;  // the engine's limit
constexpr size_t kMaxStopBytes = 1024;
constexpr int64_t kInt32Max = 2147483647;
constexpr double kMostSeconds = 1e9;

// Reads {"token id": bias, ...}.
std::vector<LogitBias> read_logit_bias(Fields& fields) {
  std::vector<LogitBias> biases;
  const json* given = fields.find("logit_bias");
  if (given == nullptr) return biases;
  if (!given->is_object()) {
    fields.fail("logit_bias",
                std::string("must be an object of token ids and numbers, not ") + given->type_name());
    return biases;
  }
  if (given->size() > kMaxLogitBiases) {
    fields.fail("logit_bias", "has " + std::to_string(given->size()) + " tokens; the limit is " +
                                  std::to_string(kMaxLogitBiases));
    return biases;
  }
  Fields inner(*given, "logit_bias.");
  for (const auto& item : given->items()) {
    const std::string& key = item.key();
    const bool is_id = !key.empty() && key.size() < 10 && key.find_first_not_of("0123456789") == key.npos;
    if (!is_id) inner.fail(key.substr(0, 20), "is not a token id");
    if (item.value().is_null()) inner.fail(key.substr(0, 20), "must be a number, got null");
    if (!inner.ok()) break;
    const double bias = inner.number(key, 0, -100, 100);
    if (inner.ok()) biases.push_back({std::stoi(key), static_cast<float>(bias)});
  }
  fields.merge(inner);
  return biases;
}

// Reads one field under two names: vLLM's min_tokens, and SGLang's min_new_tokens, which takes precedence.
int64_t read_min_tokens(Fields& fields) {
  const int64_t least = fields.integer("min_tokens", 0, 0, kInt32Max);
  return fields.integer("min_new_tokens", least, 0, kInt32Max);
}

// RFC 4648, with padding.
std::string to_base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = i; k < i + 3; ++k)
      bits = bits << 8 | (k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0u);
    for (size_t digit = 0; digit < 4; ++digit)
      text += i + digit > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * digit) & 63];
  }
  return text;
}

// Names the first of a prompt's ids that is not in the vocabulary.
void check_vocabulary(const Engine& engine, Fields& fields, const std::string& name,
                      const std::vector<int32_t>& ids) {
  const int64_t size = engine.info().vocab_size;
  const auto is_outside = [size](int32_t id) { return id < 0 || id >= size; };
  const auto unknown = std::find_if(ids.begin(), ids.end(), is_outside);
  if (unknown == ids.end()) return;
  fields.fail(name + "[" + std::to_string(unknown - ids.begin()) + "]",
              "is out of vocabulary: token ids must be between 0 and " + std::to_string(size - 1) + ", got " +
                  std::to_string(*unknown));
}

// Whether a prompt of `num_ids` tokens fits the context and its request's routed_experts_from.
bool check_prompt(const Engine& engine, Fields& fields, const Request& request, int64_t num_ids) {
  if (num_ids + (request.sampling.max_new_tokens > 0 ? 1 : 0) > engine.info().context_length)
    fields.fail("", context_overflow(engine, "the prompt has " + std::to_string(num_ids) + " tokens"));
  if (request.routed_experts_from > num_ids)
    fields.fail("routed_experts_start_len", "must not exceed the prompt's length of " +
                                                std::to_string(num_ids) + " tokens, got " +
                                                std::to_string(request.routed_experts_from));
  return fields.ok();
}

}  // namespace

std::string make_id(const std::string& prefix) {
  thread_local std::random_device device;
  static constexpr char kHex[] = "0123456789abcdef";
  std::string id = prefix;
  for (int word = 0; word < 4; ++word) {
    uint32_t bits = device();
    for (int i = 0; i < 8; ++i, bits >>= 4) id += kHex[bits & 15];
  }
  return id;
}

SamplingParams read_sampling(Fields& fields, const SamplingParams& defaults) {
  SamplingParams s = defaults;
  s.temperature = static_cast<float>(fields.number("temperature", s.temperature, 0, 100));
  s.top_p = static_cast<float>(fields.number("top_p", s.top_p, 0, 1, true));
  s.top_k = static_cast<int32_t>(fields.integer("top_k", s.top_k, -1, kInt32Max));
  if (s.top_k == 0) fields.fail("top_k", "must be -1 (all tokens) or at least 1, got 0");
  s.min_p = static_cast<float>(fields.number("min_p", s.min_p, 0, 1));
  s.frequency_penalty = static_cast<float>(fields.number("frequency_penalty", 0, -2, 2));
  s.presence_penalty = static_cast<float>(fields.number("presence_penalty", 0, -2, 2));
  s.repetition_penalty =
      static_cast<float>(fields.number("repetition_penalty", s.repetition_penalty, 0, 2, true));
  s.repetition_penalty =  // llama-server's name
      static_cast<float>(fields.number("repeat_penalty", s.repetition_penalty, 0, 2, true));
  s.logit_bias = read_logit_bias(fields);
  s.min_new_tokens = read_min_tokens(fields);
  constexpr int64_t kNoSeed = INT64_MIN;
  int64_t seed = fields.integer("seed", kNoSeed, kNoSeed + 1, INT64_MAX);
  seed = fields.integer("sampling_seed", seed, kNoSeed, INT64_MAX);  // SGLang's name
  if (seed != kNoSeed) s.seed = static_cast<uint64_t>(seed);
  s.stop = fields.strings("stop");
  if (s.stop.size() > kMaxStops)
    fields.fail("stop", "has " + std::to_string(s.stop.size()) + " strings; the limit is " +
                            std::to_string(kMaxStops));
  for (const std::string& stop : s.stop) {
    if (stop.empty() || stop.size() > kMaxStopBytes)
      fields.fail("stop", "has a string of " + std::to_string(stop.size()) +
                              " bytes; the allowed length is 1 to " + std::to_string(kMaxStopBytes));
  }
  s.stop_regex = fields.strings("stop_regex");
  s.stop_token_ids = fields.ids("stop_token_ids");
  s.ignore_eos = fields.boolean("ignore_eos", s.ignore_eos);
  s.skip_special_tokens = fields.boolean("skip_special_tokens", s.skip_special_tokens);
  s.no_stop_trim = fields.boolean("no_stop_trim", s.no_stop_trim);
  s.no_stop_trim = fields.boolean("include_stop_str_in_output", s.no_stop_trim);  // vLLM's name
  read_foreign_fields(fields);
  return s;
}

void read_identity(Fields& fields, const std::string& id_prefix, Request& request) {
  constexpr size_t kMaxIdBytes = 256;
  for (const char* name : {"request_id", "rid"}) {
    const std::string id = fields.string(name, request.id);
    if (fields.find(name) != nullptr && (id.empty() || id.size() > kMaxIdBytes))
      fields.fail(name, "has " + std::to_string(id.size()) + " bytes; the allowed length is 1 to " +
                            std::to_string(kMaxIdBytes));
    request.id = id;
  }
  if (request.id.empty()) request.id = make_id(id_prefix);
}

void read_routed_experts(Fields& fields, Request& request) {
  const bool wanted = fields.boolean("return_routed_experts", false);
  const int64_t start = fields.integer("routed_experts_start_len", 0, 0, kInt32Max);
  if (wanted) request.routed_experts_from = start;
}

int64_t read_max_tokens(Fields& fields, int64_t otherwise) {
  const int64_t predicted = fields.integer("n_predict", otherwise, -1, kInt32Max);
  return fields.integer("max_tokens", predicted < 0 ? kInt32Max : predicted, 0, kInt32Max);
}

int64_t read_n(Fields& fields) { return fields.integer("n", 1, 1, kMaxChoices); }

void fail_text(Fields& fields, const std::string& name, const Status& status) {
  const bool is_limit = status.code() == StatusCode::kDoesNotFit;  // HTTP: context_length_exceeded
  fields.fail(name, is_limit ? invalid_argument(status.message()) : status);
}

Status context_overflow(const Engine& engine, const std::string& fact) {
  return does_not_fit("This model's maximum context length is " +
                      std::to_string(engine.info().context_length) +
                      " tokens (prompt and output together), but " + fact);
}

bool check_text_size(const Engine& engine, Fields& fields, const std::string& name, size_t num_bytes) {
  const ModelInfo& info = engine.info();
  const int64_t bytes = static_cast<int64_t>(num_bytes), longest = info.max_bytes_per_token;
  if (longest == 0 || bytes / longest <= info.context_length) return true;
  fields.fail(
      name, context_overflow(engine, "the text has " + std::to_string(bytes) + " bytes, which is at least " +
                                         std::to_string(bytes / longest) + " tokens"));
  return false;
}

std::vector<int32_t> encode(const Engine& engine, Fields& fields, const std::string& name,
                            const std::string& text, bool add_special_tokens) {
  if (!check_text_size(engine, fields, name, text.size())) return {};
  Result<std::vector<int32_t>> ids = engine.tokenize(text, add_special_tokens);
  if (!ids.ok()) {
    fail_text(fields, name, ids.status());
    return {};
  }
  if (ids->empty()) fields.fail(name, "is empty: a prompt needs at least one token");
  return std::move(ids).value();
}

void add_requests(const Engine& engine, GenerationCall& call, Fields& fields,
                  const std::vector<Request>& common, std::vector<std::vector<int32_t>> prompts, int64_t n) {
  const double timeout = fields.number("timeout", 0, 0, kMostSeconds);
  constexpr int64_t kNoPriority = INT64_MIN;
  const int64_t priority = fields.integer("priority", kNoPriority, -kInt32Max, kInt32Max);
  const size_t count = prompts.size() * static_cast<size_t>(n);
  if (count > kMaxSubmissions) {
    return fields.fail("n", std::to_string(prompts.size()) + " prompts x n=" + std::to_string(n) +
                                " exceed the limit of " + std::to_string(kMaxSubmissions) +
                                " outputs per request");
  }
  call.name = common.front().id;
  const auto common_of = [&common](size_t i) -> const Request& { return common[common.size() > 1 ? i : 0]; };
  int64_t num_tokens = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (!check_prompt(engine, fields, common_of(i), std::ssize(prompts[i]))) return;
    num_tokens += n * std::ssize(prompts[i]);
  }
  if (num_tokens > kMaxSubmittedTokens)
    return fields.fail("n", "n=" + std::to_string(n) + " times the number of prompt tokens is " +
                                std::to_string(num_tokens) + "; the limit is " +
                                std::to_string(kMaxSubmittedTokens) + " per request");
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto prompt = std::make_shared<const std::vector<int32_t>>(std::move(prompts[i]));
    for (int64_t k = 0; k < n; ++k) {
      Request request = common_of(i);
      if (count > 1) request.id += "-" + std::to_string(call.requests.size());
      request.timeout_seconds = timeout;
      if (priority != kNoPriority) request.priority = priority;
      if (request.sampling.seed) *request.sampling.seed += static_cast<uint64_t>(k);
      call.requests.push_back(std::move(request));
      call.prompts.push_back(prompt);
    }
  }
}

void read_prefill_node(const Engine& engine, Fields& fields, GenerationCall& call) {
  const std::string& mode = engine.info().disaggregation_mode;
  if (mode == "prefill")
    return fields.fail("", unsupported("this is a prefill node, which serves only decode nodes; send "
                                       "requests to a router (fp4moe router)"));
  if (mode != "decode") return;
  constexpr int64_t kDefaultPort = 8998;  // SGLang's
  std::string host = fields.string("bootstrap_host", "");
  const int64_t port = fields.integer("bootstrap_port", kDefaultPort, 1, 65535);
  fields.find("bootstrap_room");  // ignored: SGLang's routers send it, but here the nodes choose the room
  if (host.empty())
    return fields.fail("bootstrap_host",
                       "is missing: this is a decode node, which accepts requests only from a "
                       "router (fp4moe router)");
  constexpr size_t kMaxHostBytes = 253;  // longest host name (RFC 1035)
  if (host.size() > kMaxHostBytes)
    return fields.fail("bootstrap_host", "has " + std::to_string(host.size()) + " bytes; the limit is " +
                                             std::to_string(kMaxHostBytes));
  if (host.find(':') != std::string::npos && host.front() != '[') host = "[" + host + "]";
  for (Request& request : call.requests) request.prefill_node = host + ":" + std::to_string(port);
}

Prompts read_prompts(const Engine& engine, Fields& fields, const std::string& name, PromptKind kind,
                     bool add_special_tokens) {
  Prompts prompts;
  const json* value = fields.find(name);
  const json* first = value != nullptr && value->is_array() && !value->empty() ? &value->front() : value;
  if (value == nullptr) {
    fields.fail(name, "is missing");
    return prompts;
  }
  prompts.is_list = first != value && (first->is_array() || first->is_string());
  const bool is_text = first->is_string();
  const bool is_ids = first->is_number() || first->is_array();
  if (is_text ? kind == PromptKind::kIds : kind == PromptKind::kText || !is_ids) {
    const char* wanted = kind == PromptKind::kIds    ? "token ids"
                         : kind == PromptKind::kText ? "a string"
                                                     : "a string, token ids";
    fields.fail(name, std::string("must be ") + wanted + " or a list of them");
  } else if (prompts.is_list && value->size() > kMaxSubmissions) {
    fields.fail(name, "has " + std::to_string(value->size()) + " prompts; the limit is " +
                          std::to_string(kMaxSubmissions));
  } else if (is_text) {
    prompts.texts = fields.strings(name);
    for (const std::string& text : prompts.texts)
      prompts.ids.push_back(encode(engine, fields, name, text, add_special_tokens));
  } else if (prompts.is_list) {
    for (size_t i = 0; i < value->size(); ++i) {
      const json one = {{name, (*value)[i]}};
      Fields inner(one);
      prompts.ids.push_back(inner.ids(name));
      check_vocabulary(engine, inner, name + "[" + std::to_string(i) + "]", prompts.ids.back());
      fields.merge(inner);
    }
  } else {
    prompts.ids.push_back(fields.ids(name));
    check_vocabulary(engine, fields, name, prompts.ids.back());
  }
  for (const auto& ids : prompts.ids) {
    if (ids.empty()) fields.fail(name, "is empty: a prompt needs at least one token");
  }
  return prompts;
}

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "none";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return "none";
}

json routed_experts_text(const Choice& choice) {
  if (choice.routed_experts == nullptr) return nullptr;
  const std::span<const int32_t> ids(*choice.routed_experts);
  return to_base64({reinterpret_cast<const char*>(ids.data()), ids.size_bytes()});
}

json matched_stop(const Choice& choice) {
  if (!choice.matched_stop.empty()) return choice.matched_stop;
  if (choice.matched_stop_token >= 0) return choice.matched_stop_token;
  return nullptr;
}

}  // namespace fp4moe
