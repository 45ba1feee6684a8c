// ChatTemplate: a checkpoint's Jinja chat template, rendered exactly as in Hugging Face (Jinja2, sandboxed).
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "fp4moe/engine.h"
#include "fp4moe/status.h"

namespace fp4moe {

class ChatTemplate {
 public:
  // `source` is the template's text. kInvalidArgument, with line and reason, for a syntax error.
  static Result<ChatTemplate> parse(std::string_view source);
  // Reads chat_template.jinja or tokenizer_config.json's chat_template (a string, or a list of named
  // templates: "default", and "tool_use" for requests with tools) in `folder`, or the file `override_path` if
  // that is not empty.
  // Reads bos_token, eos_token and other special tokens from tokenizer_config.json as template variables.
  // kUnsupported if the folder has no template; there is no fallback.
  static Result<ChatTemplate> load(const std::string& folder, const std::string& override_path);
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  const std::string& source() const;  // all templates, if there are several

  // kInvalidArgument: malformed JSON, raise_exception or another run-time error, with the template's line;
  // kDoesNotFit: a limit on steps, depth, memory or output was exceeded. Thread-safe.
  Result<std::string> render(std::string_view messages_json, const ChatTemplateOptions& options) const;

 private:
  struct State;
  explicit ChatTemplate(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
