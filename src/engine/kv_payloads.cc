// The JSON payloads of KvWire. Floats travel as the number that their bits are: exact, and never no JSON.
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "engine/kv_wire.h"

namespace fp4moe {
namespace {

using Json = nlohmann::json;

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

template <class T>
T whole_number(const Json& value) {
  if (!value.is_number_integer()) throw std::out_of_range("no whole number: " + value.dump());
  const auto number = value.get<int64_t>();
  const bool wraps = value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX};
  if (wraps || number < int64_t{std::numeric_limits<T>::min()} ||
      number > static_cast<int64_t>(std::numeric_limits<T>::max()))
    throw std::out_of_range("out of range: " + value.dump());
  return static_cast<T>(number);
}

uint64_t unsigned_number(const Json& value) {
  if (!value.is_number_unsigned()) throw std::out_of_range("no number from 0 on: " + value.dump());
  return value.get<uint64_t>();
}

float float_of(const Json& bits) { return std::bit_cast<float>(whole_number<uint32_t>(bits)); }

std::vector<int32_t> ids_of(const Json& list) {
  std::vector<int32_t> ids;
  for (const Json& id : list) ids.push_back(whole_number<int32_t>(id));
  return ids;
}

// What `read` makes of the JSON; anything that it throws is the peer's mistake.
template <class T, class Read>
Result<T> decode(std::span<const uint8_t> payload, const char* what, const Read& read) {
  try {
    return read(Json::parse(payload.begin(), payload.end()));
  } catch (const std::exception& error) {
    return data_loss(std::string("malformed ") + what + ": " + error.what());
  }
}

// [id, logprob, [[id, logprob], ...]]
Json token_json(const SampledToken& token) {
  Json top = Json::array();
  for (const TokenLogprob& t : token.top) top.push_back({t.token_id, bits_of(t.logprob)});
  return {token.token_id, bits_of(token.logprob), std::move(top)};
}

SampledToken token_of(const Json& j) {
  SampledToken token{whole_number<int32_t>(j.at(0)), float_of(j.at(1)), {}};
  for (const Json& top : j.at(2))
    token.top.push_back({whole_number<int32_t>(top.at(0)), float_of(top.at(1)), {}});
  return token;
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
  return decode<KvHello>(payload, "hello", [](const Json& j) {
    KvHello hello{.epoch = unsigned_number(j.at("epoch"))};
    for (const Json& fact : j.at("facts"))
      hello.facts.emplace_back(fact.at(0).get<std::string>(), fact.at(1).get<std::string>());
    return hello;
  });
}

// A parameter that is new in SamplingParams does not compile here before it is sent.
std::string encode_prefill(const Request& request) {
  const auto& [id, input_ids, sampling, timeout_seconds, prompt_logprobs_from, routed_experts_from, priority,
               prefill_node] = request;
  const auto& [temperature, top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty,
               logit_bias, seed, max_new_tokens, min_new_tokens, stop, stop_regex, stop_token_ids, ignore_eos,
               skip_special_tokens, no_stop_trim, top_logprobs, grammar] = sampling;
  return Json{{"input_ids", input_ids},
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
              {"grammar", {static_cast<int>(grammar.kind), grammar.text}}}
      .dump();
}

Result<Request> decode_prefill(std::span<const uint8_t> payload) {
  return decode<Request>(payload, "request", [](const Json& j) {
    Request request;
    request.input_ids = ids_of(j.at("input_ids"));
    request.prompt_logprobs_from = whole_number<int64_t>(j.at("prompt_logprobs_from"));
    request.routed_experts_from = whole_number<int64_t>(j.at("routed_experts_from"));
    if (const Json& priority = j.at("priority"); !priority.is_null())
      request.priority = whole_number<int64_t>(priority);
    SamplingParams& s = request.sampling;
    s.temperature = float_of(j.at("temperature"));
    s.top_p = float_of(j.at("top_p"));
    s.top_k = whole_number<int32_t>(j.at("top_k"));
    s.min_p = float_of(j.at("min_p"));
    s.frequency_penalty = float_of(j.at("frequency_penalty"));
    s.presence_penalty = float_of(j.at("presence_penalty"));
    s.repetition_penalty = float_of(j.at("repetition_penalty"));
    for (const Json& bias : j.at("logit_bias"))
      s.logit_bias.push_back({whole_number<int32_t>(bias.at(0)), float_of(bias.at(1))});
    s.seed = unsigned_number(j.at("seed"));
    s.max_new_tokens = whole_number<int64_t>(j.at("max_new_tokens"));
    s.min_new_tokens = whole_number<int64_t>(j.at("min_new_tokens"));
    s.stop = j.at("stop").get<std::vector<std::string>>();
    s.stop_regex = j.at("stop_regex").get<std::vector<std::string>>();
    s.stop_token_ids = ids_of(j.at("stop_token_ids"));
    s.ignore_eos = j.at("ignore_eos").get<bool>();
    s.skip_special_tokens = j.at("skip_special_tokens").get<bool>();
    s.no_stop_trim = j.at("no_stop_trim").get<bool>();
    s.top_logprobs = whole_number<int32_t>(j.at("top_logprobs"));
    const auto kind = whole_number<int32_t>(j.at("grammar").at(0));
    if (kind < 0 || kind > static_cast<int>(GrammarSpec::Kind::kStructuralTag))
      throw std::out_of_range("kind of grammar " + std::to_string(kind));
    s.grammar = {static_cast<GrammarSpec::Kind>(kind), j.at("grammar").at(1).get<std::string>()};
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
  return decode<FirstToken>(payload, "first token", [](const Json& j) {
    FirstToken first;
    first.token = token_of(j.at("token"));
    for (const Json& token : j.at("scored")) first.scored.push_back(token_of(token));
    first.experts = ids_of(j.at("experts"));
    first.cached_tokens = whole_number<int64_t>(j.at("cached_tokens"));
    return first;
  });
}

std::string encode_failure(const Status& status) {
  return Json{{"code", static_cast<int>(status.code())}, {"message", status.message()}}.dump(
      -1, ' ', false, Json::error_handler_t::replace);
}

Status decode_failure(std::span<const uint8_t> payload) {
  struct Failure {
    Status status;
  };
  const auto failure = decode<Failure>(payload, "failure", [](const Json& j) {
    const auto code = whole_number<int32_t>(j.at("code"));
    if (code < 1 || code > static_cast<int>(StatusCode::kInternal))
      throw std::out_of_range("status code " + std::to_string(code));
    return Failure{{static_cast<StatusCode>(code), j.at("message").get<std::string>()}};
  });
  return failure.ok() ? failure->status : failure.status();
}

}  // namespace fp4moe
