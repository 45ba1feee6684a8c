#include "io/jinja/chat_template.h"

#include <nlohmann/json.hpp>

#include <new>
#include <optional>

#include "base/check.h"
#include "io/file.h"
#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/parser.h"
#include "io/jinja/text.h"
#include "io/json_document.h"

namespace fp4moe {

namespace {

constexpr int64_t kMaxTemplateBytes = int64_t{jinja::kMaxSourceBytes};
constexpr int64_t kMaxConfigBytes = int64_t{64} << 20;

// Hugging Face appends this text to a final message to be continued, to find the message's end in the output.
constexpr std::string_view kContinueTag = "CONTINUE_FINAL_MESSAGE_TAG ";

struct SpecialToken {
  std::string name;                 // such as "bos_token"
  std::vector<std::string> values;  // one value, or several for additional_special_tokens
  bool is_list = false;
};

// The sources of a checkpoint's templates; tool_use, if present, renders requests with tools.
struct Sources {
  std::string standard;
  std::optional<std::string> tool_use;
};

Status to_status(const jinja::Error& error) {
  const std::string where =
      error.line > 0 ? "chat template line " + std::to_string(error.line) + ": " : "chat template: ";
  return error.kind == jinja::ErrorKind::kLimit ? does_not_fit(where + error.message)
                                                : invalid_argument(where + error.message);
}

// Calls `work` and converts jinja::Error, which it may throw, into a Status.
template <class Work>
auto guarded(Work work) -> Result<decltype(work())> {
  try {
    return work();
  } catch (const jinja::Error& error) {
    return to_status(error);
  } catch (const std::bad_alloc&) {
    return does_not_fit("chat template: out of memory");
  }
}

// Returns the text of a special token, given as a string or as an AddedToken object.
std::optional<std::string> token_text(const Json& token) {
  if (token.is_string()) return token.get<std::string>();
  if (token.is_object() && token.contains("content") && token["content"].is_string())
    return token["content"].get<std::string>();
  return std::nullopt;
}

Result<std::vector<SpecialToken>> read_special_tokens(const Json& config, const std::string& path) {
  static constexpr const char* kNames[] = {
      "bos_token", "eos_token", "unk_token",  "sep_token",
      "pad_token", "cls_token", "mask_token", "additional_special_tokens"};
  std::vector<SpecialToken> tokens;
  for (const char* name : kNames) {
    const auto found = config.find(name);
    if (found == config.end() || found->is_null()) continue;
    SpecialToken token{name, {}, found->is_array()};
    if (token.is_list && found->empty()) continue;
    for (const Json& one : token.is_list ? *found : Json::array({*found})) {
      std::optional<std::string> text = token_text(one);
      if (!text) return data_loss(path + ": " + name + " is " + json_brief(one) + ", not a token's text");
      token.values.push_back(std::move(*text));
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

// Reads tokenizer_config.json's chat_template: a string, or a list of {"name", "template"}.
Result<std::optional<Sources>> sources_in_config(const Json& config, const std::string& path) {
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return std::optional<Sources>();
  if (found->is_string()) return std::optional<Sources>(Sources{found->get<std::string>(), {}});
  if (!found->is_array()) return data_loss(path + ": chat_template is neither a string nor a list");
  Sources sources;
  bool has_default = false;
  for (const Json& entry : *found) {
    const bool is_named = entry.is_object() && entry.contains("name") && entry["name"].is_string() &&
                          entry.contains("template") && entry["template"].is_string();
    if (!is_named) return data_loss(path + ": chat_template has an entry without a name or template");
    if (entry["name"] == "tool_use") sources.tool_use = entry["template"].get<std::string>();
    if (entry["name"] != "default") continue;
    sources.standard = entry["template"].get<std::string>();
    has_default = true;
  }
  if (!has_default) return unsupported(path + ": no chat_template is named \"default\"");
  return std::optional<Sources>(std::move(sources));
}

// Returns a copy of a final message's content with the tag appended to its text, or to its last text block.
jinja::Value tagged_content(jinja::Heap& heap, const jinja::Value& content) {
  if (const jinja::Text* text = content.as<jinja::Text>())
    return jinja::heap_text(heap, std::string(text->bytes) + std::string(kContinueTag));
  const jinja::Sequence* blocks = content.sequence();
  std::vector<jinja::Value> copy;
  if (blocks != nullptr) copy.assign(blocks->items.begin(), blocks->items.end());
  for (size_t i = copy.size(); i-- > 0;) {
    const jinja::Dict* block = copy[i].dict();
    const jinja::Value* text =
        block == nullptr ? nullptr : jinja::find(heap, *block, jinja::text_value("text"));
    if (text == nullptr || !text->is<jinja::Text>()) continue;
    jinja::DictBuilder builder(heap);
    for (const auto& [key, value] : block->entries) builder.set(key, value);
    builder.set(jinja::text_value("text"), tagged_content(heap, *text));
    copy[i] = jinja::Value(builder.finish());
    return jinja::list_value(heap, copy);
  }
  jinja::fail("continue_final_message needs a final message with text");
}

jinja::Value tagged_messages(jinja::Heap& heap, const jinja::Value& messages) {
  std::vector<jinja::Value> copy = jinja::iterate(heap, messages);
  const jinja::Dict* final_message = copy.empty() ? nullptr : copy.back().dict();
  const jinja::Value* content =
      final_message == nullptr ? nullptr : jinja::find(heap, *final_message, jinja::text_value("content"));
  if (content == nullptr) jinja::fail("continue_final_message needs a final message with content");
  jinja::DictBuilder builder(heap);
  for (const auto& [key, value] : final_message->entries) builder.set(key, value);
  builder.set(jinja::text_value("content"), tagged_content(heap, *content));
  copy.back() = jinja::Value(builder.finish());
  return jinja::list_value(heap, copy);
}

// Returns the text up to the end of the final message. If the template has trimmed the tag's trailing space,
// it also trims contents, so the white space before the tag is removed as well.
std::string cut_at_tag(std::string text) {
  const std::string_view bare = jinja::strip(kContinueTag, jinja::Sides::kBoth);
  const size_t at = text.rfind(bare);
  if (at == std::string::npos)
    jinja::fail("continue_final_message: the final message does not appear in the rendered chat");
  const bool is_whole = text.compare(at, kContinueTag.size(), kContinueTag) == 0;
  text.resize(at);
  return is_whole ? text : std::string(jinja::strip(text, jinja::Sides::kRight));
}

}  // namespace

struct ChatTemplate::State {
  jinja::Body standard;
  std::optional<jinja::Body> tool_use;
  std::vector<SpecialToken> special_tokens;
  std::string source;

  std::string render(std::string_view messages_json, const ChatTemplateOptions& options) const;
};

ChatTemplate::ChatTemplate(std::unique_ptr<State> state) : state_(std::move(state)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

Result<ChatTemplate> ChatTemplate::parse(std::string_view source) {
  auto state = std::make_unique<State>();
  FP4MOE_ASSIGN_OR_RETURN(state->standard, guarded([&] { return jinja::parse_template(source); }));
  state->source = source;
  return ChatTemplate(std::move(state));
}

Result<ChatTemplate> ChatTemplate::load(const std::string& folder, const std::string& override_path) {
  const std::string config_path = folder + "/tokenizer_config.json",
                    own_path = folder + "/chat_template.jinja";
  Json config = Json::object();
  if (file_exists(config_path)) {
    FP4MOE_ASSIGN_OR_RETURN(const std::string text, read_text_file(config_path, kMaxConfigBytes));
    FP4MOE_ASSIGN_OR_RETURN(config, parse_json(text, config_path));
    if (!config.is_object()) return data_loss(config_path + " is not a JSON object");
  }
  std::string path = override_path;
  if (path.empty() && file_exists(own_path)) path = own_path;
  std::optional<Sources> sources;
  if (!path.empty()) {
    FP4MOE_ASSIGN_OR_RETURN(std::string text, read_text_file(path, kMaxTemplateBytes));
    sources = Sources{std::move(text), {}};
  } else {
    path = config_path;
    FP4MOE_ASSIGN_OR_RETURN(sources, sources_in_config(config, config_path));
  }
  if (!sources)
    return unsupported(
        folder +
        " has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json");
  auto made = parse(sources->standard);
  if (!made.ok()) return made.status().with_context(path);
  State& state = *made->state_;
  if (sources->tool_use) {
    auto tool_use = guarded([&] { return jinja::parse_template(*sources->tool_use); });
    if (!tool_use.ok()) return tool_use.status().with_context(path + ": tool_use");
    state.tool_use = std::move(*tool_use);
    state.source += *sources->tool_use;
  }
  FP4MOE_ASSIGN_OR_RETURN(state.special_tokens, read_special_tokens(config, config_path));
  return made;
}

const std::string& ChatTemplate::source() const { return state_->source; }

std::string ChatTemplate::State::render(std::string_view messages_json,
                                        const ChatTemplateOptions& options) const {
  using jinja::Value;
  jinja::Heap heap({});
  jinja::Interpreter interpreter(heap);
  Value messages = jinja::from_json(heap, messages_json, "messages");
  if (messages.sequence() == nullptr) jinja::fail("messages must be a JSON array");
  if (options.continue_final_message) messages = tagged_messages(heap, messages);
  Value tools{jinja::None{}};
  if (!options.tools_json.empty()) tools = jinja::from_json(heap, options.tools_json, "tools");
  for (const SpecialToken& token : special_tokens) {
    std::vector<Value> values;
    for (const std::string& value : token.values) values.push_back(jinja::text_value(value));
    interpreter.set(token.name, token.is_list ? jinja::list_value(heap, values) : values[0]);
  }
  interpreter.set("tools", tools);
  interpreter.set("documents", Value(jinja::None{}));
  interpreter.set("add_generation_prompt", Value(options.add_generation_prompt));
  if (!options.kwargs_json.empty()) {
    const Value kwargs = jinja::from_json(heap, options.kwargs_json, "chat_template_kwargs");
    if (kwargs.dict() == nullptr) jinja::fail("chat_template_kwargs must be a JSON object");
    for (const auto& [key, value] : kwargs.dict()->entries)
      interpreter.set(key.as<jinja::Text>()->bytes, value);
  }
  interpreter.set("messages", messages);
  std::string text = interpreter.render(tool_use && !tools.is<jinja::None>() ? *tool_use : standard);
  return options.continue_final_message ? cut_at_tag(std::move(text)) : text;
}

Result<std::string> ChatTemplate::render(std::string_view messages_json,
                                         const ChatTemplateOptions& options) const {
  if (options.continue_final_message && options.add_generation_prompt)
    return invalid_argument("continue_final_message and add_generation_prompt are mutually exclusive");
  return guarded([&] { return state_->render(messages_json, options); });
}

}  // namespace fp4moe
