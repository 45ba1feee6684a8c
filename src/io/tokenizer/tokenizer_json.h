// Access to the tokenizer's JSON files with errors that name the file and the key. Only for the tokenizer's
// .cc files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "io/json_document.h"

namespace fp4moe {

// Token ids in all known tokenizers are below 2^19; the bound keeps a malformed file from exhausting memory.
inline constexpr int32_t kMaxTokenIds = 1 << 22;

// A value of the document and its path. Absent values read as null.
class JsonCursor {
 public:
  // `file`, a literal, names the document in errors.
  JsonCursor(const Json& value, std::string path, const char* file = "tokenizer.json")
      : value_(&value), path_(std::move(path)), file_(file) {}

  const Json& value() const { return *value_; }
  const std::string& path() const { return path_; }
  bool is_null() const { return value_->is_null(); }
  // Returns null if this is not an object or has no such key.
  JsonCursor operator[](std::string_view key) const;
  // Precondition: this is an array with more than `index` elements.
  JsonCursor element(size_t index) const;

  // kInvalidArgument: "FILE: PATH is VALUE; expected ...", or "FILE: PATH is missing; expected ...".
  Status error(const std::string& expected) const;
  Result<std::string_view> string() const;  // points into the document
  Result<bool> boolean() const;
  Result<bool> boolean_or(bool fallback) const;  // fallback if null or absent
  Result<int32_t> token_id() const;              // below kMaxTokenIds
  Result<size_t> array_size() const;
  // Returns the "type" of an object.
  Result<std::string_view> type() const { return (*this)["type"].string(); }

 private:
  const Json* value_;
  std::string path_;
  const char* file_;
};

}  // namespace fp4moe
