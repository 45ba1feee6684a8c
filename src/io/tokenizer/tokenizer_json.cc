#include "io/tokenizer/tokenizer_json.h"

namespace fp4moe {

JsonCursor JsonCursor::operator[](std::string_view key) const {
  static const Json kNull;
  std::string path = path_.empty() ? std::string(key) : path_ + "." + std::string(key);
  if (!value_->is_object()) return {kNull, std::move(path), file_};
  const auto found = value_->find(key);
  return {found == value_->end() ? kNull : *found, std::move(path), file_};
}

JsonCursor JsonCursor::element(size_t index) const {
  return {(*value_)[index], path_ + "[" + std::to_string(index) + "]", file_};
}

Status JsonCursor::error(const std::string& expected) const {
  const std::string found = is_null() ? "missing" : json_brief(*value_);
  return invalid_argument(std::string(file_) + ": " + path_ + " is " + found + "; expected " + expected);
}

Result<std::string_view> JsonCursor::string() const {
  if (!value_->is_string()) return error("a string");
  return std::string_view(value_->get_ref<const std::string&>());
}

Result<bool> JsonCursor::boolean() const {
  if (!value_->is_boolean()) return error("true or false");
  return value_->get<bool>();
}

Result<bool> JsonCursor::boolean_or(bool fallback) const {
  if (is_null()) return fallback;
  return boolean();
}

Result<int32_t> JsonCursor::token_id() const {
  const bool fits = value_->is_number_unsigned() && value_->get<uint64_t>() < uint64_t{kMaxTokenIds};
  if (!fits) return error("a token id from 0 to " + std::to_string(kMaxTokenIds - 1));
  return static_cast<int32_t>(value_->get<uint64_t>());
}

Result<size_t> JsonCursor::array_size() const {
  if (!value_->is_array()) return error("an array");
  return value_->size();
}

}  // namespace fp4moe
