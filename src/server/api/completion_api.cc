#include "server/api/openai_format.h"
#include "server/chat/grammar_fields.h"

namespace fp4moe {

namespace {

constexpr int64_t kDefaultMaxTokens = 16;  // OpenAI's

class CompletionFormat final : public OpenAiFormat {
 public:
  bool logprobs = false;
  std::vector<std::string> echoes;  // one per prompt; empty: no echo

  explicit CompletionFormat(const Engine& engine)
      : OpenAiFormat(engine, "cmpl-", "text_completion", "text_completion"), engine_(engine) {}

  std::vector<json> events(const Choice& choice, const Delta& delta) override {
    const bool has_ids = returns_token_ids() && !delta.token_ids.empty();
    if (delta.text.empty() && delta.logprobs.empty() && !has_ids &&
        delta.finish_reason == FinishReason::kNone)
      return {};
    const bool is_first = !choice.started;
    json e = entry(choice, echo(choice, is_first) + delta.text,
                   is_first ? 0 : choice.logprobs.size() - delta.logprobs.size(), is_first);
    if (returns_token_ids()) e["token_ids"] = delta.token_ids;
    return {event(choice, std::move(e))};
  }

 private:
  json whole_choice(const Choice& choice) const override {
    json e = entry(choice, echo(choice, true) + choice.text, 0, true);
    if (returns_token_ids()) e["token_ids"] = choice.token_ids;
    return e;
  }

  // The prompt to prepend to a choice's first text; empty for later texts and without echo.
  std::string echo(const Choice& choice, bool is_first) const {
    return is_first && !echoes.empty() ? echoes[static_cast<size_t>(choice.index / n())] : "";
  }

  json entry(const Choice& choice, const std::string& text, size_t first_logprob, bool with_prompt) const {
    json e = {{"index", choice.index}, {"text", text}, {"logprobs", nullptr}};
    if (logprobs) e["logprobs"] = logprobs_object(choice, first_logprob, with_prompt && !echoes.empty());
    e["finish_reason"] = nullptr;
    if (choice.finish_reason != FinishReason::kNone) {
      e["finish_reason"] = finish_reason_name(choice.finish_reason);
      e["matched_stop"] = matched_stop(choice);
    }
    if (returns_token_ids() && with_prompt) e["prompt_token_ids"] = *choice.prompt_ids;
    return e;
  }

  std::string name_of(const TokenLogprob& token) const {
    return token_text(token_name(token, names_tokens_by_id()));
  }

  // OpenAI's four parallel lists.
  struct Lists {
    json tokens = json::array(), values = json::array(), tops = json::array(), offsets = json::array();

    void add(const std::string& token, json value, json top, size_t offset) {
      tokens.push_back(token);
      values.push_back(std::move(value));
      tops.push_back(std::move(top));
      offsets.push_back(offset);
    }
  };

  // Covers the prompt, if it is echoed, and the output positions from `first` on. Offsets count the bytes of
  // all reported tokens. The chosen token is included in top_logprobs whatever its rank.
  json logprobs_object(const Choice& choice, size_t first, bool with_prompt) const {
    Lists lists;
    size_t offset = 0;
    const auto add = [&](const PositionLogprobs& position, bool is_reported) {
      const std::string& bytes = position.chosen.bytes;
      if (is_reported) {
        json top = json::object();
        for (const TokenLogprob& t : position.top) top.emplace(name_of(t), t.logprob);
        const std::string chosen = name_of(position.chosen);
        top.emplace(chosen, position.chosen.logprob);
        lists.add(chosen, position.chosen.logprob, std::move(top), offset);
      }
      offset += bytes.size();
    };
    if (!echoes.empty()) {
      const int32_t first_id = choice.prompt_ids->front();  // has no logprob
      const std::string bytes = engine_.token_bytes(first_id);
      if (with_prompt) lists.add(name_of({first_id, 0, bytes}), nullptr, nullptr, offset);
      offset += bytes.size();
      for (const PositionLogprobs& position : choice.prompt_logprobs) add(position, with_prompt);
    }
    for (size_t i = 0; i < choice.logprobs.size(); ++i) add(choice.logprobs[i], i >= first);
    return {{"tokens", std::move(lists.tokens)},
            {"token_logprobs", std::move(lists.values)},
            {"top_logprobs", std::move(lists.tops)},
            {"text_offset", std::move(lists.offsets)}};
  }

  const Engine& engine_;
};

// The text to echo for each prompt: the given text, or its decoded ids.
std::vector<std::string> echoes_of(const Engine& engine, Fields& fields, const Prompts& prompts) {
  if (!prompts.texts.empty()) return prompts.texts;
  std::vector<std::string> echoes;
  for (const std::vector<int32_t>& ids : prompts.ids) {
    Result<std::string> text = engine.detokenize(ids, /*skip_special_tokens=*/false);
    if (!text.ok()) {
      fail_text(fields, "prompt", text.status());
      return {};
    }
    echoes.push_back(std::move(text).value());
  }
  return echoes;
}

}  // namespace

GenerationCall parse_completion(const Engine& engine, Fields& fields) {
  GenerationCall call;
  auto format = std::make_unique<CompletionFormat>(engine);
  Request request{.sampling = read_sampling(fields, engine.info().default_sampling)};
  request.sampling.grammar = read_grammar(engine, fields);
  read_response_format(engine, fields, request.sampling.grammar);
  request.sampling.max_new_tokens = read_max_tokens(fields, kDefaultMaxTokens);
  const int64_t top = fields.integer("logprobs", -1, 0, kMaxTopLogprobs);
  format->logprobs = top >= 0;
  request.sampling.top_logprobs = static_cast<int32_t>(top);
  const bool echo = fields.boolean("echo", false);
  if (echo && format->logprobs) request.prompt_logprobs_from = 0;
  format->read(call, fields, request);
  fields.refuse("best_of", format->n());
  fields.refuse("suffix", "");
  const bool add_special_tokens = fields.boolean("add_special_tokens", true);
  if (!fields.ok()) return call;
  Prompts prompts = read_prompts(engine, fields, "prompt", PromptKind::kAny, add_special_tokens);
  if (fields.ok() && echo) format->echoes = echoes_of(engine, fields, prompts);
  add_requests(engine, call, fields, {request}, std::move(prompts.ids), format->n());
  OpenAiFormat::check_experts(fields, call);
  call.format = std::move(format);
  return call;
}

}  // namespace fp4moe
