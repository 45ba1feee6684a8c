// The JSON payloads of KvWire. A float is sent as the integer value of its bits, which is exact and valid
// JSON even for NaN and infinity.
#include <bit>
#include <limits>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/check.h"
#include "base/printable.h"
#include "engine/disagg/kv_wire.h"
#include "io/json_document.h"

namespace fp4moe {
namespace {

constexpr size_t kMaxFacts = 16, kMaxFactNameBytes = 64, kMaxFactBytes = 256, kMaxFailureBytes = 1024;
constexpr size_t kSentFailureBytes = 960;  // leaves room for the truncation note within kMaxFailureBytes

// The deepest valid payload is a first token: object, scored, token, alternatives, alternative.
constexpr JsonLimits kSmall{.max_depth = 4, .max_values = 64, .max_containers = 32, .max_keys = 8};
constexpr JsonLimits kOfPrefill{
    .max_depth = 4, .max_values = 1 << 22, .max_containers = 1 << 19, .max_keys = 32};
constexpr JsonLimits kOfFirstToken{
    .max_depth = 6, .max_values = 1 << 24, .max_containers = 1 << 23, .max_keys = 8};

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// Describes a value without its contents: "array of 3".
std::string kind_of(const Json& value) {
  std::string kind = value.type_name();
  if (value.is_structured()) kind += " of " + std::to_string(value.size());
  if (value.is_string())
    kind += " of " + std::to_string(value.get_ref<const std::string&>().size()) + " bytes";
  return kind;
}

[[noreturn]] void wrong(const char* field, const char* legal, const Json& value) {
  throw std::out_of_range(std::string(field) + ": expected " + legal + ", got " + kind_of(value));
}

template <class T>
T whole_number(const Json& value, const char* field) {
  if (!value.is_number_integer()) wrong(field, "an integer", value);
  const auto number = value.get<int64_t>();
  const bool wraps = value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX};
  if (wraps || number < int64_t{std::numeric_limits<T>::min()} ||
      number > static_cast<int64_t>(std::numeric_limits<T>::max()))
    throw std::out_of_range(std::string(field) + ": " +
                            (wraps ? std::to_string(value.get<uint64_t>()) : std::to_string(number)) +
                            " is out of range");
  return static_cast<T>(number);
}

uint64_t unsigned_number(const Json& value, const char* field) {
  if (!value.is_number_unsigned()) wrong(field, "a non-negative integer", value);
  return value.get<uint64_t>();
}

float float_of(const Json& bits, const char* field) {
  return std::bit_cast<float>(whole_number<uint32_t>(bits, field));
}

bool boolean_of(const Json& value, const char* field) {
  if (!value.is_boolean()) wrong(field, "a boolean", value);
  return value.get<bool>();
}

const std::string& text_of(const Json& value, const char* field) {
  if (!value.is_string()) wrong(field, "a string", value);
  return value.get_ref<const std::string&>();
}

const Json& list_of(const Json& value, const char* field) {
  if (!value.is_array()) wrong(field, "an array", value);
  return value;
}

// An array of exactly `size` values.
const Json& tuple_of(const Json& value, size_t size, const char* field) {
  if (!value.is_array() || value.size() != size)
    wrong(field, ("an array of " + std::to_string(size)).c_str(), value);
  return value;
}

const Json& field_of(const Json& object, const char* field) {
  if (!object.is_object()) wrong("payload", "an object", object);
  const auto found = object.find(field);
  if (found == object.end()) throw std::out_of_range(std::string(field) + " is missing");
  return *found;
}

std::vector<int32_t> ids_of(const Json& list, const char* field) {
  std::vector<int32_t> ids;
  ids.reserve(list_of(list, field).size());
  for (const Json& id : list) ids.push_back(whole_number<int32_t>(id, field));
  return ids;
}

std::vector<std::string> texts_of(const Json& list, const char* field) {
  std::vector<std::string> texts;
  for (const Json& text : list_of(list, field)) texts.push_back(text_of(text, field));
  return texts;
}

// Parses the JSON and calls `read` on it; an exception from `read` means a malformed payload. Large payloads
// are decoded one at a time: a document takes up to eight times the memory of its text.
template <class T, class Read>
Result<T> decode(std::span<const uint8_t> payload, const char* what, const JsonLimits& limits,
                 const Read& read) {
  constexpr size_t kLargeBytes = 1 << 20;
  static std::mutex large;
  std::unique_lock turn(large, std::defer_lock);
  if (payload.size() > kLargeBytes) turn.lock();
  const std::string malformed = std::string("malformed ") + what;
  try {
    const std::string_view text(reinterpret_cast<const char*>(payload.data()), payload.size());
    FP4MOE_ASSIGN_OR_RETURN(const Json document, parse_json(text, malformed, limits));
    return read(document);
  } catch (const std::bad_alloc&) {
    return unavailable("no memory for a " + std::string(what) + " of " + std::to_string(payload.size()) +
                       " bytes");
  } catch (const std::exception& error) {
    return data_loss(malformed + ": " + printable(error.what()));
  }
}

// [[id, logprob], ...]
Json logprobs_json(const std::vector<TokenLogprob>& tokens) {
  Json list = Json::array();
  for (const TokenLogprob& t : tokens) list.push_back({t.token_id, bits_of(t.logprob)});
  return list;
}

std::vector<TokenLogprob> logprobs_of(const Json& list, const char* field) {
  std::vector<TokenLogprob> tokens;
  for (const Json& t : list_of(list, field)) {
    tuple_of(t, 2, field);
    tokens.push_back({whole_number<int32_t>(t[0], field), float_of(t[1], field), {}});
  }
  return tokens;
}

// [id, logprob, top, ids]
Json token_json(const SampledToken& token) {
  return {token.token_id, bits_of(token.logprob), logprobs_json(token.top), logprobs_json(token.ids)};
}

SampledToken token_of(const Json& value, const char* field) {
  const Json& j = tuple_of(value, 4, field);
  return {whole_number<int32_t>(j[0], field), float_of(j[1], field), logprobs_of(j[2], field),
          logprobs_of(j[3], field)};
}

Json biases_json(const std::vector<LogitBias>& biases) {
  Json list = Json::array();
  for (const LogitBias& bias : biases) list.push_back({bias.token_id, bits_of(bias.bias)});
  return list;
}

}  // namespace

std::string encode_kv_hello(const KvHello& hello) {
  Json list = Json::array();
  for (const auto& [name, value] : hello.facts) list.push_back({name, value});
  return Json{{"epoch", hello.epoch}, {"facts", list}}.dump();
}

Result<KvHello> decode_kv_hello(std::span<const uint8_t> payload) {
  return decode<KvHello>(payload, "hello", kSmall, [](const Json& j) {
    KvHello hello{.epoch = unsigned_number(field_of(j, "epoch"), "epoch")};
    const Json& facts = list_of(field_of(j, "facts"), "facts");
    if (facts.size() > kMaxFacts) wrong("facts", "an array of at most 16", facts);
    for (const Json& fact : facts) {
      tuple_of(fact, 2, "facts");
      const std::string &name = text_of(fact[0], "facts"), &value = text_of(fact[1], "facts");
      if (name.size() > kMaxFactNameBytes) wrong("facts", "a name of at most 64 bytes", fact[0]);
      if (value.size() > kMaxFactBytes) wrong("facts", "a value of at most 256 bytes", fact[1]);
      hello.facts.emplace_back(name, value);
    }
    return hello;
  });
}

// The structured bindings fail to compile when Request gains a field, so that it is not left unsent.
std::string encode_prefill(const Request& request) {
  const auto& [id, input_ids, sampling, client, timeout_seconds, prompt_logprobs_from, routed_experts_from,
               priority, prefill_node] = request;
  const auto& [temperature, top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty,
               logit_bias, seed, max_new_tokens, min_new_tokens, stop, stop_regex, stop_token_ids, ignore_eos,
               skip_special_tokens, no_stop_trim, top_logprobs, token_ids_logprob, grammar] = sampling;
  return Json{{"input_ids", input_ids},
              {"client", client},
              {"prompt_logprobs_from", prompt_logprobs_from},
              {"routed_experts_from", routed_experts_from},
              {"priority", priority ? Json(*priority) : Json()},
              {"temperature", bits_of(temperature)},
              {"top_p", bits_of(top_p)},
              {"top_k", top_k},
              {"min_p", bits_of(min_p)},
              {"frequency_penalty", bits_of(frequency_penalty)},
              {"presence_penalty", bits_of(presence_penalty)},
              {"repetition_penalty", bits_of(repetition_penalty)},
              {"logit_bias", biases_json(logit_bias)},
              {"seed", seed.value()},
              {"max_new_tokens", max_new_tokens},
              {"min_new_tokens", min_new_tokens},
              {"stop", stop},
              {"stop_regex", stop_regex},
              {"stop_token_ids", stop_token_ids},
              {"ignore_eos", ignore_eos},
              {"skip_special_tokens", skip_special_tokens},
              {"no_stop_trim", no_stop_trim},
              {"top_logprobs", top_logprobs},
              {"token_ids_logprob", token_ids_logprob},
              {"grammar", {static_cast<int>(grammar.kind), grammar.text}}}
      .dump();
}

Result<Request> decode_prefill(std::span<const uint8_t> payload) {
  return decode<Request>(payload, "request", kOfPrefill, [](const Json& j) {
    const auto integer = [&j](auto& out, const char* name) {
      out = whole_number<std::remove_reference_t<decltype(out)>>(field_of(j, name), name);
    };
    const auto real = [&j](float& out, const char* name) { out = float_of(field_of(j, name), name); };
    const auto boolean = [&j](bool& out, const char* name) { out = boolean_of(field_of(j, name), name); };
    Request request;
    request.input_ids = ids_of(field_of(j, "input_ids"), "input_ids");
    request.client = text_of(field_of(j, "client"), "client");
    integer(request.prompt_logprobs_from, "prompt_logprobs_from");
    integer(request.routed_experts_from, "routed_experts_from");
    if (!field_of(j, "priority").is_null()) integer(request.priority.emplace(), "priority");
    SamplingParams& s = request.sampling;
    real(s.temperature, "temperature");
    real(s.top_p, "top_p");
    integer(s.top_k, "top_k");
    real(s.min_p, "min_p");
    real(s.frequency_penalty, "frequency_penalty");
    real(s.presence_penalty, "presence_penalty");
    real(s.repetition_penalty, "repetition_penalty");
    for (const Json& bias : list_of(field_of(j, "logit_bias"), "logit_bias")) {
      tuple_of(bias, 2, "logit_bias");
      s.logit_bias.push_back({whole_number<int32_t>(bias[0], "logit_bias"), float_of(bias[1], "logit_bias")});
    }
    s.seed = unsigned_number(field_of(j, "seed"), "seed");
    integer(s.max_new_tokens, "max_new_tokens");
    integer(s.min_new_tokens, "min_new_tokens");
    s.stop = texts_of(field_of(j, "stop"), "stop");
    s.stop_regex = texts_of(field_of(j, "stop_regex"), "stop_regex");
    s.stop_token_ids = ids_of(field_of(j, "stop_token_ids"), "stop_token_ids");
    boolean(s.ignore_eos, "ignore_eos");
    boolean(s.skip_special_tokens, "skip_special_tokens");
    boolean(s.no_stop_trim, "no_stop_trim");
    integer(s.top_logprobs, "top_logprobs");
    s.token_ids_logprob = ids_of(field_of(j, "token_ids_logprob"), "token_ids_logprob");
    const Json& grammar = tuple_of(field_of(j, "grammar"), 2, "grammar");
    const auto kind = whole_number<int32_t>(grammar[0], "grammar");
    if (kind < 0 || kind > static_cast<int>(GrammarSpec::Kind::kStructuralTag))
      throw std::out_of_range("grammar: unknown kind " + std::to_string(kind));
    s.grammar = {static_cast<GrammarSpec::Kind>(kind), text_of(grammar[1], "grammar")};
    return request;
  });
}

std::string encode_first_token(const FirstToken& first) {
  Json scored = Json::array();
  for (const SampledToken& token : first.scored) scored.push_back(token_json(token));
  return Json{{"token", token_json(first.token)},
              {"scored", std::move(scored)},
              {"experts", first.experts},
              {"cached_tokens", first.cached_tokens}}
      .dump();
}

Result<FirstToken> decode_first_token(std::span<const uint8_t> payload) {
  return decode<FirstToken>(payload, "first token", kOfFirstToken, [](const Json& j) {
    FirstToken first;
    first.token = token_of(field_of(j, "token"), "token");
    for (const Json& token : list_of(field_of(j, "scored"), "scored"))
      first.scored.push_back(token_of(token, "scored"));
    first.experts = ids_of(field_of(j, "experts"), "experts");
    first.cached_tokens = whole_number<int64_t>(field_of(j, "cached_tokens"), "cached_tokens");
    return first;
  });
}

std::string encode_failure(const Status& status) {
  return Json{{"code", static_cast<int>(status.code())},
              {"message", printable(status.message(), kSentFailureBytes)}}
      .dump();
}

Status decode_failure(std::span<const uint8_t> payload) {
  struct Failure {
    Status status;
  };
  const auto failure = decode<Failure>(payload, "failure", kSmall, [](const Json& j) {
    const auto code = whole_number<int32_t>(field_of(j, "code"), "code");
    if (code < 1 || code > static_cast<int>(StatusCode::kInternal))
      throw std::out_of_range("code: " + std::to_string(code) + " is out of range");
    const std::string& message = text_of(field_of(j, "message"), "message");
    return Failure{{static_cast<StatusCode>(code), printable(message, kMaxFailureBytes)}};
  });
  return failure.ok() ? failure->status : failure.status();
}

}  // namespace fp4moe
