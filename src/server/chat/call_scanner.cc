#include "server/chat/call_scanner.h"

#include <utility>

#include "server/json.h"

namespace fp4moe {

namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

// Decodes a JSON string literal; false if it is not valid.
bool decode(const std::string& literal, std::string& value) {
  const Result<json> parsed = parse_json(literal);
  if (!parsed.ok() || !parsed->is_string()) return false;
  value = parsed->get<std::string>();
  return true;
}

}  // namespace

size_t CallScanner::push(std::string_view text, OutputParts& parts) {
  size_t taken = 0;
  while (taken < text.size() && !is_complete()) take(text[taken++]);
  if (!has_begun_) raw_ += text.substr(0, taken);
  pass_on(parts);
  return taken;
}

void CallScanner::finish(OutputParts& parts) {
  if (has_name_ && !std::exchange(has_begun_, true)) parts.push_back({OutputPart::Kind::kCall, name_});
}

void CallScanner::pass_on(OutputParts& parts) {
  if (is_complete() && !std::exchange(has_arguments_, true)) arguments_ = "{}";
  if (!has_name_ || !has_arguments_) return;
  if (!std::exchange(has_begun_, true)) parts.push_back({OutputPart::Kind::kCall, name_});
  if (!arguments_.empty()) parts.push_back({OutputPart::Kind::kArguments, std::exchange(arguments_, {})});
}

void CallScanner::take(char c) {
  switch (state_) {
    case State::kStart:
      if (!is_space(c)) state_ = c == '{' ? State::kKey : State::kWrong;
      break;
    case State::kKey:
      take_key(c);
      break;
    case State::kColon:
      if (!is_space(c)) state_ = c == ':' ? State::kValue : State::kWrong;
      break;
    case State::kValue:
      take_value(c);
      break;
    case State::kAfterValue:
      if (!is_space(c)) state_ = c == ',' ? State::kKey : c == '}' ? State::kComplete : State::kWrong;
      break;
    case State::kComplete:
    case State::kWrong:
      break;
  }
}

// Whether c, a character of a JSON string, is its closing quote.
bool CallScanner::is_end_of_string(char c) {
  const bool is_end = c == '"' && !escaped_;
  escaped_ = c == '\\' && !escaped_;
  return is_end;
}

// Takes one character of a quoted key or of the white space before it, or the '}' of an empty object.
void CallScanner::take_key(char c) {
  if (!in_string_) {
    if (is_space(c)) return;
    in_string_ = c == '"';
    key_ = c;
    if (!in_string_) state_ = c == '}' ? State::kComplete : State::kWrong;
    return;
  }
  key_ += c;
  if (!is_end_of_string(c)) return;
  in_string_ = false;
  std::string key;
  state_ = decode(key_, key) ? State::kColon : State::kWrong;
  key_ = std::move(key);
}

void CallScanner::take_value(char c) {
  const bool is_first = value_.empty();
  if (is_first && is_space(c)) return;
  const bool is_scalar = !is_first && depth_ == 0 && !in_string_;
  if (is_scalar && (is_space(c) || c == ',' || c == '}')) {
    end_value();
    return take(c);
  }
  const bool is_passed_on = is_arguments() && (is_first ? c != '"' : value_[0] != '"');
  if (is_first || !is_passed_on) value_ += c;
  if (is_passed_on) {
    has_arguments_ = true;
    arguments_ += c;
  }
  if (in_string_) {
    in_string_ = !is_end_of_string(c);
  } else {
    in_string_ = c == '"';
    if (c == '{' || c == '[') ++depth_;
    if (c == '}' || c == ']') --depth_;
    if (depth_ < 0) state_ = State::kWrong;
    if (c != '}' && c != ']') return;
  }
  if (!in_string_ && depth_ == 0) end_value();
}

void CallScanner::end_value() {
  state_ = State::kAfterValue;
  if (key_ == "name") {
    has_name_ = decode(value_, name_);
    if (!has_name_) state_ = State::kWrong;
  }
  if (is_arguments() && value_[0] == '"') {  // the object was written as a JSON string
    has_arguments_ = true;
    decode(value_, arguments_);
  }
  value_.clear();
  depth_ = 0;
}

}  // namespace fp4moe
