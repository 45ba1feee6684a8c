// Reads a tool call {"name": "f", "arguments": {...}} from JSON that arrives in pieces.
#pragma once

#include <string>
#include <string_view>

#include "server/chat/output_parser.h"

namespace fp4moe {

class CallScanner {
 public:
  // Consumes text up to the object's end and returns the number of bytes consumed. Once the name is known,
  // appends the text of "arguments" (or "parameters") to `parts` as it arrives.
  size_t push(std::string_view text, OutputParts& parts);

  bool is_complete() const { return state_ == State::kComplete; }
  bool is_inside_string() const { return in_string_; }
  // At the end of the output: emits a call whose name is known, even if its arguments have not begun.
  void finish(OutputParts& parts);
  bool has_begun() const { return has_begun_; }    // a kCall part was emitted
  const std::string& raw() const { return raw_; }  // the consumed text, until has_begun()

 private:
  enum class State { kStart, kKey, kColon, kValue, kAfterValue, kComplete, kWrong };

  void take(char c);
  void take_key(char c);
  void take_value(char c);
  void end_value();
  bool is_end_of_string(char c);
  void pass_on(OutputParts& parts);
  bool is_arguments() const { return key_ == "arguments" || key_ == "parameters"; }

  State state_ = State::kStart;
  int depth_ = 0;  // bracket depth inside the value
  bool in_string_ = false, escaped_ = false;
  std::string raw_, key_, value_;  // value_: the current value; only the first byte of non-string arguments
  std::string name_, arguments_;   // arguments_: not emitted yet
  bool has_name_ = false, has_arguments_ = false, has_begun_ = false;
};

}  // namespace fp4moe
