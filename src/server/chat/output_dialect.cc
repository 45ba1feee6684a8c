#include "server/chat/output_dialect.h"

#include <algorithm>
#include <utility>

#include "server/chat/argument_types.h"
#include "server/chat/grammar_fields.h"

namespace fp4moe {

bool is_special(const Engine& engine, int32_t id) {
  const Result<std::string> text = engine.detokenize({id}, /*skip_special_tokens=*/true);
  return text.ok() && text->empty();
}

namespace {

constexpr const char* kThinkBegin = "<think>";
constexpr const char* kThinkEnd = "</think>";

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

// The token id if `text` encodes to exactly one token, else -1.
int32_t token_of(const Engine& engine, std::string_view text) {
  const Result<std::vector<int32_t>> ids = engine.tokenize(text, /*add_special_tokens=*/false);
  return ids.ok() && ids->size() == 1 && engine.token_bytes(ids->front()) == text ? ids->front() : -1;
}

std::string_view without_space_behind(std::string_view text) {
  const size_t end = text.find_last_not_of(" \t\r\n");
  return text.substr(0, end == std::string_view::npos ? 0 : end + 1);
}

// ---- structural-tag formats -----------------------------------------------------------------------

json text_format(std::string_view text) { return {{"type", "const_string"}, {"value", std::string(text)}}; }

// A marker that is a special token is matched by id: string rules of a grammar never match special tokens.
json marker_format(const Engine& engine, std::string_view marker) {
  const int32_t id = token_of(engine, marker);
  if (id >= 0 && is_special(engine, id)) return {{"type", "token"}, {"token", id}};
  return text_format(marker);
}

json sequence(json elements) { return {{"type", "sequence"}, {"elements", std::move(elements)}}; }
json optional(json content) { return {{"type", "optional"}, {"content", std::move(content)}}; }
json star(json content) { return {{"type", "star"}, {"content", std::move(content)}}; }
json any_of(json elements) {
  return elements.size() == 1 ? elements[0] : json{{"type", "or"}, {"elements", std::move(elements)}};
}

// Any tokens except `ids` and the model's end-of-sequence tokens.
json any_tokens_but(const Engine& engine, std::vector<int32_t> ids) {
  const std::vector<int32_t>& ends = engine.info().eos_token_ids;
  ids.insert(ids.end(), ends.begin(), ends.end());
  std::erase_if(ids, [](int32_t id) { return id < 0; });
  return {{"type", "any_tokens"}, {"exclude_tokens", ids}};
}

// Returns the text other than </think> that ends reasoning, or "": Kimi-K2 and Qwen3.5 can begin their calls
// before </think>.
std::string_view other_think_end(CallSyntax calls) {
  if (calls == CallSyntax::kKimi) return kKimiTokens.section_begin;
  return calls == CallSyntax::kFunctionTags ? kFunctionCallBegin : std::string_view();
}

// The first token of that text; -1: none.
int32_t other_think_end_token(const Engine& engine, CallSyntax calls) {
  const std::string_view end = other_think_end(calls);
  return end.empty() ? -1 : token_of(engine, end.starts_with(kCallTag) ? kCallTag : end);
}

// Reasoning that ends in </think>.
json think_format(const Engine& engine, const OutputDialect& dialect, bool inside) {
  const json space = {{"type", "regex"}, {"pattern", "\\n{0,2}"}};
  json parts = json::array();
  if (!inside) parts.push_back(marker_format(engine, kThinkBegin));
  if (const int32_t end = token_of(engine, kThinkEnd); end >= 0) {
    parts.push_back(any_tokens_but(engine, {end, other_think_end_token(engine, dialect.calls)}));
    parts.push_back({{"type", "token"}, {"token", end}});
  } else {
    parts.push_back({{"type", "any_text"}, {"excludes", json::array({kThinkEnd})}});
    parts.push_back(text_format(kThinkEnd));
  }
  parts.push_back(space);
  return inside ? sequence(std::move(parts)) : optional(sequence(std::move(parts)));
}

// Harmony's optional analysis message before the final message or the call.
json harmony_analysis(const Engine& engine) {
  std::vector<int32_t> markers;
  for (const char* text : {"<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"})
    markers.push_back(token_of(engine, text));
  const auto marker = [&](const char* text) { return marker_format(engine, text); };
  return optional(sequence(json::array({marker("<|channel|>"), text_format("analysis"), marker("<|message|>"),
                                        any_tokens_but(engine, std::move(markers)), marker("<|end|>"),
                                        marker("<|start|>"), text_format("assistant")})));
}

bool is_inside_reasoning(const OutputDialect& dialect, const std::string& prompt) {
  return dialect.thinks && without_space_behind(prompt).ends_with(kThinkBegin);
}

// The grammar parts before the actual response; no reasoning part if the prompt itself closes the reasoning.
json parts_before(const Engine& engine, const OutputDialect& dialect, const std::string& prompt) {
  json parts = json::array();
  if (dialect.thinks && !without_space_behind(prompt).ends_with(kThinkEnd))
    parts.push_back(think_format(engine, dialect, is_inside_reasoning(dialect, prompt)));
  if (dialect.calls == CallSyntax::kHarmony) parts.push_back(harmony_analysis(engine));
  return parts;
}

// ---- calls ----------------------------------------------------------------------------------------

// A call between tags, as kHermes, kArgumentTags or kFunctionTags.
json tagged_call(CallSyntax syntax, const ToolUse::Function& f) {
  json arguments = json_schema_format(f.parameters, f.place);
  std::string begin, end;
  if (syntax == CallSyntax::kHermes) {
    begin = "<tool_call>\n{\"name\": " + to_text(f.name) + ", \"arguments\": ";
    end = "}\n</tool_call>";
  } else if (syntax == CallSyntax::kArgumentTags) {
    arguments["style"] = "glm_xml";
    begin = std::string(kCallTag) + f.name + "\n";
    end = kCallEndTag;
  } else {
    arguments["style"] = "qwen_xml";
    arguments["max_whitespace_cnt"] = 1;  // between tags and values; else a weak model writes nothing else
    begin = std::string(kFunctionCallBegin) + f.name + ">\n";
    end = std::string(kFunctionEndTag) + "\n" + std::string(kCallEndTag);
  }
  return {{"type", "tag"}, {"begin", begin}, {"content", std::move(arguments)}, {"end", end}};
}

json tagged_calls(CallSyntax syntax, const ToolUse& tools) {
  json tags = json::array();
  for (const ToolUse::Function& f : tools.functions) tags.push_back(tagged_call(syntax, f));
  return {{"type", "tags_with_separator"},
          {"tags", std::move(tags)},
          {"separator", "\n"},
          {"at_least_one", true},
          {"stop_after_first", !tools.parallel}};
}

// The parts of a call between CALL_BEGIN and CALL_END.
json call_parts(const Engine& engine, const OutputDialect& dialect, const ToolUse::Function& f) {
  const bool is_kimi = dialect.calls == CallSyntax::kKimi;
  const json separator = marker_format(engine, is_kimi ? kKimiTokens.separator : kDeepSeekTokens.separator);
  const json arguments = json_schema_format(f.parameters, f.place);
  if (is_kimi)
    return {text_format("functions." + f.name + ":"),
            {{"type", "regex"}, {"pattern", "[0-9]{1,4}"}},
            separator,
            arguments};
  if (!dialect.fences_arguments) return {text_format(f.name), separator, arguments};
  return {text_format("function"), separator, text_format(f.name + "\n```json\n"), arguments,
          text_format("\n```")};
}

// Calls between the tokens of DeepSeek or Kimi.
json token_calls(const Engine& engine, const OutputDialect& dialect, const ToolUse& tools) {
  const CallTokens& tokens = dialect.calls == CallSyntax::kKimi ? kKimiTokens : kDeepSeekTokens;
  json calls = json::array();
  for (const ToolUse::Function& f : tools.functions) {
    json parts = json::array({marker_format(engine, tokens.call_begin)});
    for (json& part : call_parts(engine, dialect, f)) parts.push_back(std::move(part));
    parts.push_back(marker_format(engine, tokens.call_end));
    calls.push_back(sequence(std::move(parts)));
  }
  const json call = any_of(std::move(calls));
  json parts = json::array({marker_format(engine, tokens.section_begin), call});
  if (tools.parallel)
    parts.push_back(star(dialect.fences_arguments ? sequence(json::array({text_format("\n"), call})) : call));
  parts.push_back(marker_format(engine, tokens.section_end));
  return sequence(std::move(parts));
}

json harmony_call(const Engine& engine, const ToolUse& tools) {
  const auto marker = [&](const char* text) { return marker_format(engine, text); };
  json calls = json::array();
  for (const ToolUse::Function& f : tools.functions)
    calls.push_back(
        sequence(json::array({text_format(f.name + " "), marker("<|constrain|>"), text_format("json"),
                              marker("<|message|>"), json_schema_format(f.parameters, f.place)})));
  return sequence(json::array(
      {marker("<|channel|>"), text_format("commentary to=functions."), any_of(std::move(calls))}));
}

json array_of_calls(const ToolUse& tools) {
  json calls = json::array();
  for (const ToolUse::Function& f : tools.functions)
    calls.push_back(sequence(json::array({text_format("{\"name\":" + to_text(f.name) + ",\"parameters\":"),
                                          json_schema_format(f.parameters, f.place), text_format("}")})));
  const json call = any_of(std::move(calls));
  json parts = json::array({text_format("["), call});
  if (tools.parallel) parts.push_back(star(sequence(json::array({text_format(","), call}))));
  parts.push_back(text_format("]"));
  return sequence(std::move(parts));
}

// At least one call in the model's own syntax, or an array if the template defines none.
json calls_format(const Engine& engine, const OutputDialect& dialect, const ToolUse& tools) {
  switch (dialect.calls) {
    case CallSyntax::kHermes:
    case CallSyntax::kArgumentTags:
    case CallSyntax::kFunctionTags:
      return tagged_calls(dialect.calls, tools);
    case CallSyntax::kDeepSeek:
    case CallSyntax::kKimi:
      return token_calls(engine, dialect, tools);
    case CallSyntax::kHarmony:
      return harmony_call(engine, tools);
    case CallSyntax::kNone:
    case CallSyntax::kJsonArray:
      break;
  }
  return array_of_calls(tools);
}

json in_order(json parts) { return parts.size() == 1 ? std::move(parts[0]) : sequence(std::move(parts)); }

}  // namespace

OutputDialect detect_dialect(const Engine& engine) {
  const std::string& source = engine.info().chat_template;
  OutputDialect dialect;
  const auto has = [&](std::string_view marker) { return contains(source, marker); };
  std::vector<std::string_view> markers;
  if (has("<|channel|>") && token_of(engine, "<|channel|>") >= 0 && token_of(engine, "<|message|>") >= 0) {
    dialect.calls = CallSyntax::kHarmony;
    markers = {"<|channel|>"};
  } else if (has(kDeepSeekTokens.call_begin) && token_of(engine, kDeepSeekTokens.call_begin) >= 0) {
    dialect.calls = CallSyntax::kDeepSeek;
    dialect.fences_arguments = has("```json");
    markers = {kDeepSeekTokens.call_begin};
  } else if (has(kKimiTokens.call_begin) && token_of(engine, kKimiTokens.call_begin) >= 0) {
    dialect.calls = CallSyntax::kKimi;
    markers = {kKimiTokens.section_begin, kKimiTokens.call_begin, kKimiTokens.separator};
  } else if (has(kCallTag) && has(kKeyTag)) {
    dialect.calls = CallSyntax::kArgumentTags;
    markers = {kCallTag, kKeyTag, kValueTag};
  } else if (has(kCallTag) && has(kFunctionTag) && has(kParameterTag)) {
    dialect.calls = CallSyntax::kFunctionTags;
    markers = {kCallTag};
  } else if (has(kCallTag) && !has(kFunctionTag)) {
    dialect.calls = CallSyntax::kHermes;
    markers = {kCallTag};
  }
  dialect.thinks = dialect.calls != CallSyntax::kHarmony && has(kThinkEnd);
  if (dialect.thinks) markers.push_back(kThinkEnd);
  for (const std::string_view text : markers) {
    const int32_t id = token_of(engine, text);
    if (id >= 0 && is_special(engine, id)) dialect.needs_special_tokens = true;
  }
  dialect.shows_tools = has("tools");
  dialect.has_developer_role = has("developer");
  dialect.names_thinking = has(".thinking") || has("\"thinking\"") || has("'thinking'");
  return dialect;
}

OutputPlan plan_output(const OutputDialect& dialect, const std::string& prompt, const ToolUse& tools,
                       bool separate_reasoning) {
  OutputPlan plan;
  const bool is_harmony = dialect.calls == CallSyntax::kHarmony;
  if (is_harmony || !tools.functions.empty()) plan.calls = dialect.calls;
  if (tools.is_forced && plan.calls == CallSyntax::kNone) plan.calls = CallSyntax::kJsonArray;
  plan.separates_reasoning = separate_reasoning;
  plan.thinks = dialect.thinks && separate_reasoning;
  plan.is_forced = tools.is_forced && (separate_reasoning || !dialect.thinks);  // else text is reasoning too
  plan.starts_inside_reasoning = is_inside_reasoning(dialect, prompt);
  if (plan.calls != CallSyntax::kArgumentTags && plan.calls != CallSyntax::kFunctionTags) return plan;
  ArgumentTypes types;
  for (const ToolUse::Function& f : tools.functions) types.add(f.name, f.parameters);
  plan.argument_types = std::make_shared<const ArgumentTypes>(std::move(types));
  return plan;
}

std::unique_ptr<OutputParser> make_parser(const OutputPlan& plan) {
  const bool is_harmony = plan.calls == CallSyntax::kHarmony;
  std::unique_ptr<OutputParser> calls =
      is_harmony ? make_harmony_parser() : make_call_parser(plan.calls, plan.argument_types);
  if (plan.is_forced) calls = make_forced_parser(std::move(calls));
  if (is_harmony || !plan.thinks) return calls;
  return make_think_parser(plan.starts_inside_reasoning, std::move(calls), other_think_end(plan.calls));
}

GrammarSpec constrain_content(const Engine& engine, const OutputDialect& dialect, const std::string& prompt,
                              const ToolUse& tools, const GrammarSpec& content) {
  if (content.kind == GrammarSpec::Kind::kNone || content.kind == GrammarSpec::Kind::kStructuralTag)
    return content;
  json parts = parts_before(engine, dialect, prompt);
  const bool may_call = !tools.functions.empty() && dialect.calls != CallSyntax::kNone;
  if (parts.empty() && !may_call) return content;
  json text = structural_format(content);
  if (dialect.calls == CallSyntax::kHarmony)
    text = sequence(json::array({marker_format(engine, "<|channel|>"), text_format("final"),
                                 marker_format(engine, "<|message|>"), std::move(text)}));
  if (may_call) {
    ToolUse free{.parallel = tools.parallel};  // as without `content`, a schema never makes a request fail
    for (const ToolUse::Function& f : tools.functions)
      free.functions.push_back({f.name, {{"type", "object"}}, f.place});
    text = any_of(json::array({std::move(text), calls_format(engine, dialect, free)}));
  }
  parts.push_back(std::move(text));
  return structural_tag(in_order(std::move(parts)));
}

GrammarSpec constrain_calls(const Engine& engine, const OutputDialect& dialect, const std::string& prompt,
                            const ToolUse& tools) {
  json parts = parts_before(engine, dialect, prompt);
  parts.push_back(calls_format(engine, dialect, tools));
  return structural_tag(in_order(std::move(parts)));
}

}  // namespace fp4moe
