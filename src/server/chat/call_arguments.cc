#include "server/chat/call_arguments.h"

#include <utility>

namespace fp4moe {

void CallArguments::begin_call(const std::string& function, OutputParts& parts) {
  function_ = function;
  has_arguments_ = false;
  parts.push_back({OutputPart::Kind::kCall, function});
}

void CallArguments::end_call(OutputParts& parts) { add(has_arguments_ ? "}" : "{}", parts); }

void CallArguments::begin(std::string_view key, OutputParts& parts) {
  key_ = key;
  value_.clear();
  trimmed_ = {};
  is_text_ = types_->is_text(function_, key_);
  is_trimmed_ = types_->is_trimmed(function_, key_);
  add(up_to_key(key_) + (is_text_ ? "\": \"" : "\": "), parts);
  has_arguments_ = true;
}

void CallArguments::put(std::string_view text, OutputParts& parts) {
  if (is_text_)
    add(json_escaped(is_trimmed_ ? trimmed_.push(text) : std::string(text)), parts);
  else
    value_ += text;
}

void CallArguments::end(OutputParts& parts) {
  add(is_text_ ? "\"" : types_->to_json(function_, key_, std::exchange(value_, {})), parts);
}

void CallArguments::cut_key(std::string_view key, OutputParts& parts) { add(up_to_key(key), parts); }

void CallArguments::cut_after_key(std::string_view key, OutputParts& parts) {
  add(up_to_key(key) + "\"", parts);
}

void CallArguments::cut_value(OutputParts& parts) { add(std::exchange(value_, {}), parts); }

std::string CallArguments::up_to_key(std::string_view key) const {
  return (has_arguments_ ? ", \"" : "{\"") + json_escaped(key);
}

void CallArguments::add(std::string text, OutputParts& parts) {
  if (!text.empty()) parts.push_back({OutputPart::Kind::kArguments, std::move(text)});
}

}  // namespace fp4moe
