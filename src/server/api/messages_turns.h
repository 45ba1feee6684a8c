// Translates the conversation of a Messages request into the messages of a chat completion.
#pragma once

#include <optional>
#include <string>

#include "fp4moe/engine.h"
#include "server/json.h"

namespace fp4moe {

// Blocks of one message, and consecutive messages of one role, become one chat message; their texts are
// joined by line breaks. Each tool result becomes a message of the role "tool". System messages
// keep their place if the chat template renders them there, else their text is added to the first one. Errors
// are recorded in the Fields with the name of the block.
class MessagesTurns {
 public:
  MessagesTurns(const Engine& engine, Fields& fields) : engine_(engine), fields_(fields) {}

  // Adds to the system message, which is the first one. `content` is a string or an array of text blocks.
  void add_system(const json& content, const std::string& name) { append_system(system_, content, name); }
  void add(const json& message, const std::string& name);
  // Whether the last message is text of the assistant, which the model continues.
  bool ends_in_prefill() const;
  // The chat's messages; leaves this object empty.
  json take();

 private:
  void append_system(json& text, const json& content, const std::string& name);
  void add_late_system(const json& content, const std::string& name);
  bool renders_late_system();
  json& turn(const std::string& role);
  void add_block(const std::string& role, const json& block, const std::string& name);
  void add_call(const json& block, const std::string& name);
  void add_result(const json& block, const std::string& name);
  std::string result_text(const json& block, const std::string& name);
  bool is_object(const json& value, const std::string& name);
  std::string string_in(const json& object, const char* key, const std::string& name);
  // The text of a text block; fails for other types, naming those that `place` allows.
  std::string text_in(const json& block, const std::string& name, const char* place);

  const Engine& engine_;
  Fields& fields_;
  std::optional<bool> renders_late_system_;  // unset: not tested yet
  json system_;                              // null: no system message
  json messages_ = json::array();
};

}  // namespace fp4moe
