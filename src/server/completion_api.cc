#include "server/grammar_fields.h"
#include "server/openai_format.h"

namespace fp4moe {

namespace {

constexpr int64_t kDefaultMaxTokens = 16;  // OpenAI's

class CompletionFormat final : public OpenAiFormat {
 public:
  bool logprobs = false;

  explicit CompletionFormat(const Engine& engine)
      : OpenAiFormat(engine, "cmpl-", "text_completion", "text_completion") {}

  std::vector<json> news(const Choice& choice, const Delta& delta) override {
    if (delta.text.empty() && delta.logprobs.empty() && delta.finish_reason == FinishReason::kNone) return {};
    return {event(entry(choice, delta.text, choice.logprobs.size() - delta.logprobs.size()))};
  }

 private:
  json whole_choice(const Choice& choice) const override { return entry(choice, choice.text, 0); }

  json entry(const Choice& choice, const std::string& text, size_t first_logprob) const {
    json e = {{"index", choice.index}, {"text", text}, {"logprobs", nullptr}};
    if (logprobs) e["logprobs"] = logprobs_object(choice.logprobs, first_logprob);
    e["finish_reason"] = nullptr;
    if (choice.finish_reason != FinishReason::kNone) {
      e["finish_reason"] = finish_reason_name(choice.finish_reason);
      e["matched_stop"] = matched_stop(choice);
    }
    return e;
  }

  // Positions from `first` on; offsets count bytes of the tokens of the whole answer.
  static json logprobs_object(const std::vector<PositionLogprobs>& positions, size_t first) {
    json tokens = json::array(), values = json::array(), tops = json::array(), offsets = json::array();
    size_t offset = 0;
    for (size_t i = 0; i < positions.size(); ++i) {
      const PositionLogprobs& position = positions[i];
      if (i >= first) {
        tokens.push_back(position.chosen.bytes);
        values.push_back(position.chosen.logprob);
        offsets.push_back(offset);
        json top = json::object();
        for (const TokenLogprob& t : position.top) top[t.bytes] = t.logprob;
        tops.push_back(std::move(top));
      }
      offset += position.chosen.bytes.size();
    }
    return {{"tokens", std::move(tokens)},
            {"token_logprobs", std::move(values)},
            {"top_logprobs", std::move(tops)},
            {"text_offset", std::move(offsets)}};
  }
};

}  // namespace

GenerationCall parse_completion(const Engine& engine, Fields& fields) {
  GenerationCall call;
  auto format = std::make_unique<CompletionFormat>(engine);
  SamplingParams sampling = read_sampling(fields, engine.info().default_sampling);
  sampling.grammar = read_grammar(engine, fields);
  read_response_format(engine, fields, sampling.grammar);
  sampling.max_new_tokens = fields.integer("max_tokens", kDefaultMaxTokens, 0, INT32_MAX);
  const int64_t top = fields.integer("logprobs", -1, 0, kMaxTopLogprobs);
  format->logprobs = top >= 0;
  sampling.top_logprobs = static_cast<int32_t>(top);
  format->read(call, fields);
  fields.refuse("best_of", format->n());
  fields.refuse("echo", false);
  fields.refuse("suffix", "");
  if (!fields.ok()) return call;
  const Prompts prompts = read_prompts(engine, fields, "prompt", PromptKind::kAny);
  add_requests(call, fields, format->id, prompts.ids, format->n(), sampling);
  call.format = std::move(format);
  return call;
}

}  // namespace fp4moe
