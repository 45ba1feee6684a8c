// Writes a call's arguments as JSON from keys and plain texts, typed by the function's schema.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "server/chat/argument_types.h"
#include "server/chat/output_parser.h"

namespace fp4moe {

class CallArguments {
 public:
  explicit CallArguments(std::shared_ptr<const ArgumentTypes> types) : types_(std::move(types)) {}

  void begin_call(const std::string& function, OutputParts& parts);
  void end_call(OutputParts& parts);

  // One argument: its key, then its text in pieces. Strings are passed on as they arrive, other values when
  // they are complete.
  void begin(std::string_view key, OutputParts& parts);
  void put(std::string_view text, OutputParts& parts);
  void end(OutputParts& parts);

  // The output ends inside a call: in a key, between a key and its value, or in a value.
  void cut_key(std::string_view key, OutputParts& parts);
  void cut_after_key(std::string_view key, OutputParts& parts);
  void cut_value(OutputParts& parts);

  const std::string& function() const { return function_; }

 private:
  std::string up_to_key(std::string_view key) const;  // without the key's closing quote
  static void add(std::string text, OutputParts& parts);

  const std::shared_ptr<const ArgumentTypes> types_;
  std::string function_, key_, value_;  // value_: not for strings
  TrimmedText trimmed_;                 // the value of a trimmed string
  bool has_arguments_ = false, is_text_ = false, is_trimmed_ = false;
};

}  // namespace fp4moe
