#include <optional>
#include <set>

#include "server/api/apis.h"
#include "server/api/foreign_fields.h"
#include "server/chat/grammar_fields.h"
#include "server/http/excerpt.h"

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
  bool text_in_logprobs = false;
  struct Logprobs {
    bool wanted = false;
    int64_t start = -1;  // >= 0: also report the prompt's logprobs from this index on
    int32_t top = 0;
    bool has_ids = false;  // token_ids_logprob is not empty
  };
  std::vector<Logprobs> logprobs;  // one per prompt
  int64_t n = 1;                   // outputs per prompt

  explicit GenerateFormat(const Engine& engine) : engine_(engine) {}

  // A running request keeps the weights from being replaced, so that its first delta has their version.
  void collect(const Choice&, const Delta&) override {
    if (weight_version_.empty()) weight_version_ = engine_.weight_source().version;
  }

  // SGLang's events repeat the whole output so far.
  bool is_cumulative() const override { return true; }
  std::vector<json> events(const Choice& choice, const Delta& delta) override {
    collect(choice, delta);
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

  // SGLang's lists: the chosen tokens, the best ones, and those of token_ids_logprob.
  struct Lists {
    json chosen = json::array(), tops = json::array(), ids = json::array();
  };

  json triples(const std::vector<TokenLogprob>& tokens) const {
    json list = json::array();
    for (const TokenLogprob& t : tokens) list.push_back(triple(t, text_in_logprobs));
    return list;
  }

  void add_logprobs(json& meta, const std::string& what, const std::vector<PositionLogprobs>& positions,
                    Lists lists, const Logprobs& asked) const {
    for (const PositionLogprobs& position : positions) {
      if (position.chosen.token_id >= 0)  // otherwise max_new_tokens is 0
        lists.chosen.push_back(triple(position.chosen, text_in_logprobs));
      lists.tops.push_back(triples(position.top));
      lists.ids.push_back(triples(position.ids));
    }
    meta[what + "_token_logprobs"] = std::move(lists.chosen);
    if (asked.top > 0) meta[what + "_top_logprobs"] = std::move(lists.tops);
    if (asked.has_ids) meta[what + "_token_ids_logprobs"] = std::move(lists.ids);
  }

  // Adds the prompt tokens from logprob_start on; like SGLang, with a null logprob for the first one.
  void add_prompt_logprobs(json& meta, const Choice& choice, const Logprobs& asked) const {
    Lists lists;
    if (asked.start >= 0 && asked.start < choice.prompt_tokens) {
      const int32_t first = (*choice.prompt_ids)[static_cast<size_t>(asked.start)];
      lists.chosen.push_back(
          {nullptr, first, text_in_logprobs ? json(engine_.token_bytes(first)) : json(nullptr)});
      lists.tops.push_back(nullptr);
      lists.ids.push_back(nullptr);
    }
    add_logprobs(meta, "input", choice.prompt_logprobs, std::move(lists), asked);
  }

  static void add_speculation(json& meta, const Choice& choice) {
    const auto ratio = [](int64_t part, int64_t whole) {
      return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
    };
    meta["spec_verify_ct"] = choice.spec_verify_ct;
    meta["spec_accept_length"] = ratio(choice.completion_tokens, choice.spec_verify_ct);
    meta["spec_accept_rate"] = ratio(choice.spec_num_correct_drafts, choice.spec_num_proposed_drafts);
    meta["spec_num_proposed_drafts"] = choice.spec_num_proposed_drafts;
    meta["spec_num_correct_drafts"] = choice.spec_num_correct_drafts;
    if (choice.finish_reason == FinishReason::kNone) return;
    for (const char* name :
         {"spec_correct_drafts_histogram", "spec_accept_histogram"})  // newer and older name
      meta[name] = choice.spec_correct_drafts_histogram;
  }

  json response(const Choice& choice) const {
    json meta = {{"id", choice.request_id},
                 {"finish_reason", finish_reason(choice)},
                 {"prompt_tokens", choice.prompt_tokens},
                 {"completion_tokens", choice.completion_tokens},
                 {"cached_tokens", choice.cached_tokens},
                 {"weight_version", weight_version_},
                 {"e2e_latency", choice.seconds}};
    if (!engine_.info().speculative_algorithm.empty()) add_speculation(meta, choice);
    if (const Logprobs& asked = logprobs[static_cast<size_t>(choice.index / n)]; asked.wanted) {
      add_logprobs(meta, "output", choice.logprobs, {}, asked);
      add_prompt_logprobs(meta, choice, asked);
    }
    if (choice.routed_experts != nullptr) meta["routed_experts"] = routed_experts_text(choice);
    return {{"text", choice.text}, {"output_ids", choice.token_ids}, {"meta_info", std::move(meta)}};
  }

  const Engine& engine_;
  std::string weight_version_;  // of the weights that made the outputs
};

// "rid": a request id, or a list with one id per response.
std::optional<std::vector<std::string>> read_ids(Fields& fields, Request& request) {
  const json* rid = fields.find("rid");
  if (rid == nullptr || !rid->is_array()) {
    read_identity(fields, "", request);
    return std::nullopt;
  }
  std::vector<std::string> ids;
  std::set<std::string> distinct;
  for (const json& id : *rid) {
    const json one = {{"rid", id}};
    Fields inner(one);
    request.id.clear();
    read_identity(inner, "", request);
    fields.merge(inner);
    // Whether the second of them is submitted before the first has ended is a matter of chance.
    if (!request.id.empty() && !distinct.insert(request.id).second)
      fields.fail("rid", "has the id \"" + excerpt(request.id) + "\" twice");
    ids.push_back(request.id);
  }
  return ids;
}

// The fields that SGLang lets a request give once for all prompts or in a list with one entry per prompt.
constexpr const char* kPerPrompt[] = {"sampling_params", "return_logprob", "logprob_start_len",
                                      "top_logprobs_num", "token_ids_logprob"};

// token_ids_logprob is a list in itself, so that only a list of lists has one entry per prompt; null is a
// list of no ids.
bool is_per_prompt(const std::string& name, const json& value) {
  if (!value.is_array() || name != "token_ids_logprob") return value.is_array();
  return !value.empty() && (value.front().is_array() || value.front().is_null());
}

// What the fields of kPerPrompt say about one prompt.
struct PromptOptions {
  SamplingParams sampling;
  bool logprobs = false;
  int64_t logprob_start = -1;
  int64_t n = 1;
};

std::vector<int32_t> read_logprob_ids(const Engine& engine, Fields& fields, const std::string& name) {
  std::vector<int32_t> ids = fields.ids(name);
  if (std::ssize(ids) > SamplingParams::kMaxLogprobIds)
    fields.fail(name, "must have at most " + std::to_string(SamplingParams::kMaxLogprobIds) +
                          " token ids, got " + std::to_string(ids.size()));
  const int64_t vocab_size = engine.info().vocab_size;
  for (const int32_t id : ids)
    if (id >= vocab_size)
      fields.fail(name, "must have ids of the vocabulary of " + std::to_string(vocab_size) + " tokens, got " +
                            std::to_string(id));
  return ids;
}

// `suffix` is "[i]" for entry i of a list, and part of the fields' names; empty: one value for all prompts.
PromptOptions read_options(const Engine& engine, Fields& fields, const std::string& suffix) {
  const json empty = json::object();
  const std::string params = "sampling_params" + suffix;
  const json* given = fields.find(params);
  Fields inner(given == nullptr ? empty : *given, params + ".");
  PromptOptions options{.sampling = read_sampling(inner, engine.info().default_sampling)};
  options.sampling.grammar = read_grammar(engine, inner);
  options.sampling.max_new_tokens = inner.integer("max_new_tokens", kDefaultMaxNewTokens, 0, INT32_MAX);
  options.n = read_n(inner);
  fields.merge(inner);
  options.logprobs = fields.boolean("return_logprob" + suffix, false);
  const int64_t top = fields.integer("top_logprobs_num" + suffix, 0, 0, kMaxTopLogprobs);
  const int64_t start = fields.integer("logprob_start_len" + suffix, -1, -1, INT32_MAX);
  std::vector<int32_t> ids = read_logprob_ids(engine, fields, "token_ids_logprob" + suffix);
  if (!options.logprobs) return options;
  options.sampling.top_logprobs = static_cast<int32_t>(top);
  options.sampling.token_ids_logprob = std::move(ids);
  options.logprob_start = start;
  return options;
}

// Entry i of each list in the body, and the values that are not lists, as fields named with the suffix "[i]".
json options_of_prompt(Fields& fields, size_t i, size_t num_prompts) {
  json object = json::object();
  for (const std::string name : kPerPrompt) {
    const json* value = fields.find(name);
    if (value == nullptr) continue;
    const bool is_list = is_per_prompt(name, *value);
    if (is_list && value->size() != num_prompts) {
      fields.fail(name, "has " + std::to_string(value->size()) + " entries, but the request has " +
                            std::to_string(num_prompts) + " prompts");
      return object;
    }
    object[name + "[" + std::to_string(i) + "]"] = is_list ? (*value)[i] : *value;
  }
  return object;
}

// One entry per prompt, or a single one for all.
std::vector<PromptOptions> read_all_options(const Engine& engine, Fields& fields, const Prompts& prompts) {
  const char* list = nullptr;
  for (const char* name : kPerPrompt)
    if (const json* value = fields.find(name); value != nullptr && is_per_prompt(name, *value)) list = name;
  if (list == nullptr) return {read_options(engine, fields, "")};
  if (!prompts.is_list)
    fields.fail(list, "must not have one entry per prompt, because the request has no list of prompts");
  const size_t num_prompts = prompts.ids.size();
  std::vector<PromptOptions> options;
  for (size_t i = 0; i < num_prompts && fields.ok(); ++i) {
    const json object = options_of_prompt(fields, i, num_prompts);
    Fields inner(object);
    options.push_back(read_options(engine, inner, "[" + std::to_string(i) + "]"));
    fields.merge(inner);
    if (options.back().n != options.front().n)
      fields.fail("sampling_params[" + std::to_string(i) + "].n",
                  "must be the same for all prompts: " + std::to_string(options.front().n) + ", got " +
                      std::to_string(options.back().n));
  }
  return options;
}

void check_logprob_start(Fields& fields, const PromptOptions& options, const std::vector<int32_t>& prompt) {
  if (options.logprob_start > std::ssize(prompt))
    fields.fail("logprob_start_len", "must not exceed the prompt's length of " +
                                         std::to_string(prompt.size()) + " tokens, got " +
                                         std::to_string(options.logprob_start));
}

}  // namespace

GenerationCall parse_generate(const Engine& engine, Fields& fields) {
  GenerationCall call;
  auto format = std::make_unique<GenerateFormat>(engine);
  Request request;
  format->text_in_logprobs = fields.boolean("return_text_in_logprobs", false);
  read_foreign_fields(fields, "token_ids_logprob");  // next to sampling_params, this route reads it
  read_routed_experts(fields, request);
  const std::optional<std::vector<std::string>> ids = read_ids(fields, request);
  call.stream = fields.boolean("stream", false);
  const bool has_text = fields.find("text") != nullptr, has_ids = fields.find("input_ids") != nullptr;
  if (has_text == has_ids) fields.fail("text", "exactly one of text and input_ids is required");
  if (!fields.ok()) return call;
  Prompts prompts = has_text ? read_prompts(engine, fields, "text", PromptKind::kText)
                             : read_prompts(engine, fields, "input_ids", PromptKind::kIds);
  const std::vector<PromptOptions> options = read_all_options(engine, fields, prompts);
  if (!fields.ok()) return call;

  const int64_t n = options.front().n;
  std::vector<Request> requests;
  for (size_t i = 0; i < prompts.ids.size(); ++i) {
    const PromptOptions& own = options[options.size() > 1 ? i : 0];
    check_logprob_start(fields, own, prompts.ids[i]);
    requests.push_back(request);
    requests.back().sampling = own.sampling;
    requests.back().prompt_logprobs_from = own.logprob_start;
    format->logprobs.push_back({own.logprobs, own.logprob_start, own.sampling.top_logprobs,
                                !own.sampling.token_ids_logprob.empty()});
  }
  format->n = n;
  format->is_list = prompts.is_list || n > 1;
  add_requests(engine, call, fields, requests, std::move(prompts.ids), n);
  if (ids && fields.ok() && ids->size() != call.requests.size())
    fields.fail("rid", "has " + std::to_string(ids->size()) + " ids, but the request has " +
                           std::to_string(call.requests.size()) + " outputs");
  for (size_t i = 0; ids && fields.ok() && i < ids->size(); ++i) call.requests[i].id = (*ids)[i];
  if (ids) call.name.clear();  // each response has its own id
  call.format = std::move(format);
  return call;
}

}  // namespace fp4moe
