#include <optional>

#include "server/api/apis.h"
#include "server/chat/grammar_fields.h"

namespace fp4moe {

namespace {

constexpr int64_t kDefaultMaxNewTokens = 128;  // SGLang's

// SGLang's triple for a token: logprob, id, text.
json triple(const TokenLogprob& t, bool with_text) {
  return json::array({t.logprob, t.token_id, with_text ? json(t.bytes) : json(nullptr)});
}

class GenerateFormat final : public ApiFormat {
 public:
  bool is_list = false;  // the response is an array
  bool logprobs = false, text_in_logprobs = false;
  int64_t logprob_start = -1;  // >= 0: also report the prompt's logprobs from this index on
  int64_t top_logprobs = 0;

  explicit GenerateFormat(const Engine& engine) : engine_(engine) {}

  // SGLang's events repeat the whole output so far.
  std::vector<json> events(const Choice& choice, const Delta& delta) override {
    if (delta.text.empty() && delta.token_ids.empty() && delta.finish_reason == FinishReason::kNone)
      return {};
    json event = response(choice);
    if (is_list) event["index"] = choice.index;
    return {std::move(event)};
  }

  std::vector<json> closing(const std::vector<Choice>&) override { return {}; }

  json whole(const std::vector<Choice>& choices) override {
    if (!is_list) return response(choices.front());
    json responses = json::array();
    for (const Choice& choice : choices) responses.push_back(response(choice));
    return responses;
  }

 private:
  static json finish_reason(const Choice& choice) {
    if (choice.finish_reason == FinishReason::kNone) return nullptr;
    json reason = {{"type", finish_reason_name(choice.finish_reason)}};
    if (choice.finish_reason == FinishReason::kLength) reason["length"] = choice.completion_tokens;
    if (choice.finish_reason == FinishReason::kStop) reason["matched"] = matched_stop(choice);
    if (choice.finish_reason == FinishReason::kAbort) reason["message"] = "aborted";
    return reason;
  }

  // Appends to the lists in `meta`.
  void add_logprobs(json& meta, const std::string& what, const std::vector<PositionLogprobs>& positions,
                    json chosen, json tops) const {
    for (const PositionLogprobs& position : positions) {
      chosen.push_back(triple(position.chosen, text_in_logprobs));
      json top = json::array();
      for (const TokenLogprob& t : position.top) top.push_back(triple(t, text_in_logprobs));
      tops.push_back(std::move(top));
    }
    meta[what + "_token_logprobs"] = std::move(chosen);
    if (top_logprobs > 0) meta[what + "_top_logprobs"] = std::move(tops);
  }

  // Adds the prompt tokens from logprob_start on; like SGLang, with a null logprob for the first one.
  void add_prompt_logprobs(json& meta, const Choice& choice) const {
    json chosen = json::array(), tops = json::array();
    if (logprob_start >= 0 && logprob_start < choice.prompt_tokens) {
      const int32_t first = (*choice.prompt_ids)[static_cast<size_t>(logprob_start)];
      chosen.push_back({nullptr, first, text_in_logprobs ? json(engine_.token_bytes(first)) : json(nullptr)});
      tops.push_back(nullptr);
    }
    add_logprobs(meta, "input", choice.prompt_logprobs, std::move(chosen), std::move(tops));
  }

  json response(const Choice& choice) const {
    json meta = {{"id", choice.request_id},
                 {"finish_reason", finish_reason(choice)},
                 {"prompt_tokens", choice.prompt_tokens},
                 {"completion_tokens", choice.completion_tokens},
                 {"cached_tokens", choice.cached_tokens},
                 {"e2e_latency", choice.seconds}};
    if (logprobs) add_logprobs(meta, "output", choice.logprobs, json::array(), json::array());
    if (logprobs) add_prompt_logprobs(meta, choice);
    if (choice.routed_experts != nullptr) meta["routed_experts"] = routed_experts_text(choice);
    return {{"text", choice.text}, {"output_ids", choice.token_ids}, {"meta_info", std::move(meta)}};
  }

  const Engine& engine_;
};

// "rid": a request id, or a list with one id per response.
std::optional<std::vector<std::string>> read_ids(Fields& fields, Request& request) {
  const json* rid = fields.find("rid");
  if (rid == nullptr || !rid->is_array()) {
    read_identity(fields, "", request);
    return std::nullopt;
  }
  std::vector<std::string> ids;
  for (const json& id : *rid) {
    const json one = {{"rid", id}};
    Fields inner(one);
    request.id.clear();
    read_identity(inner, "", request);
    fields.merge(inner);
    ids.push_back(request.id);
  }
  return ids;
}

}  // namespace

GenerationCall parse_generate(const Engine& engine, Fields& fields) {
  GenerationCall call;
  auto format = std::make_unique<GenerateFormat>(engine);
  const json empty = json::object();
  const json* given = fields.find("sampling_params");
  if (given != nullptr && given->is_array())
    fields.fail("sampling_params", unsupported("must be one object for all prompts, not a list"));
  Fields inner(given == nullptr || given->is_array() ? empty : *given, "sampling_params.");
  SamplingParams sampling = read_sampling(inner, engine.info().default_sampling);
  sampling.grammar = read_grammar(engine, inner);
  sampling.max_new_tokens = inner.integer("max_new_tokens", kDefaultMaxNewTokens, 0, INT32_MAX);
  const int64_t n = read_n(inner);
  fields.merge(inner);

  format->logprobs = fields.boolean("return_logprob", false);
  format->top_logprobs = fields.integer("top_logprobs_num", 0, 0, kMaxTopLogprobs);
  format->text_in_logprobs = fields.boolean("return_text_in_logprobs", false);
  Request request;
  const int64_t start = fields.integer("logprob_start_len", -1, -1, INT32_MAX);
  if (format->logprobs) {
    sampling.top_logprobs = static_cast<int32_t>(format->top_logprobs);
    request.prompt_logprobs_from = format->logprob_start = start;
  }
  read_routed_experts(fields, request);
  const std::optional<std::vector<std::string>> ids = read_ids(fields, request);
  request.sampling = sampling;
  call.stream = fields.boolean("stream", false);
  if (!fields.ok()) return call;

  const bool has_text = fields.find("text") != nullptr, has_ids = fields.find("input_ids") != nullptr;
  if (has_text == has_ids) fields.fail("text", "exactly one of text and input_ids is required");
  if (!fields.ok()) return call;
  Prompts prompts = has_text ? read_prompts(engine, fields, "text", PromptKind::kText)
                             : read_prompts(engine, fields, "input_ids", PromptKind::kIds);
  for (const std::vector<int32_t>& prompt : prompts.ids)
    if (format->logprobs && start > std::ssize(prompt))
      fields.fail("logprob_start_len", "must not exceed the prompt's length of " +
                                           std::to_string(prompt.size()) + " tokens, got " +
                                           std::to_string(start));
  format->is_list = prompts.is_list || n > 1;
  add_requests(engine, call, fields, request, std::move(prompts.ids), n);
  if (ids && fields.ok() && ids->size() != call.requests.size())
    fields.fail("rid", "has " + std::to_string(ids->size()) + " ids, but the request has " +
                           std::to_string(call.requests.size()) + " outputs");
  for (size_t i = 0; ids && fields.ok() && i < ids->size(); ++i) call.requests[i].id = (*ids)[i];
  if (ids) call.name.clear();  // each response has its own id
  call.format = std::move(format);
  return call;
}

}  // namespace fp4moe
