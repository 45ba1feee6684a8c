// JSON at the boundary: bounded parsing, printing that cannot fail, and typed reading of request fields.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Keeps key order, because chat templates print tools in the given order.
using json = nlohmann::ordered_json;

// An upper bound on the bytes of memory that parse_json(text) uses, from one scan of the text.
// kInvalidArgument if the text nests deeper than 64, an object has more than 4096 keys, the objects together
// have too many keys to parse quickly, or more than 128 MiB would be used.
Result<int64_t> parsed_json_bytes(std::string_view text);

// kInvalidArgument in the same cases as parsed_json_bytes(), and for malformed JSON or UTF-8.
Result<json> parse_json(std::string_view text);

// Compact; invalid UTF-8 in strings becomes U+FFFD.
std::string to_text(const json& value);
// The first 80 bytes of to_text(value), for a message about a value that a client sent.
std::string shown(const json& value);

// A field that was read, and its allowed values.
struct FieldNote {
  enum class Kind { kAny, kBoolean, kInteger, kNumber, kString, kStrings, kIds };
  std::string name;  // including the prefix
  Kind kind = Kind::kAny;
  double least = 0, most = 0;  // the range of integers and numbers
  bool open_least = false;     // least itself is excluded
};

// Reads the fields of a JSON object. Keeps the first error and its field's name; reading continues with
// defaults, so callers check once at the end. Absent and null fields have the default value.
class Fields {
 public:
  // `prefix` precedes names in errors, such as "sampling_params.".
  explicit Fields(const json& object, std::string prefix = "");

  const json* find(const std::string& name);  // nullptr if absent or null
  bool boolean(const std::string& name, bool otherwise);
  int64_t integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most);
  // least <= value <= most; `open_least` excludes least itself.
  double number(const std::string& name, double otherwise, double least, double most,
                bool open_least = false);
  std::string string(const std::string& name, const std::string& otherwise);
  std::vector<std::string> strings(const std::string& name);  // a string, or an array of them
  std::vector<int32_t> ids(const std::string& name);          // an integer, or an array of them
  // For a field that this server does not support: fails unless it is absent, null or equal to `neutral`.
  void refuse(const std::string& name, const json& neutral);

  void fail(const std::string& name, std::string message);
  void fail(const std::string& name, const Status& status);
  // Adopts the error and the unknown fields of `inner`, the Fields of a nested object.
  void merge(const Fields& inner);
  // Adopts only the error.
  void merge_error(const Fields& inner);
  // merge() for an object that was translated from this one: `rename` maps its field names to names in this
  // object, and to an empty name if there is no such field.
  void merge_translated(const Fields& inner,
                        const std::function<std::string(const std::string& name)>& rename);
  const json& object() const { return object_; }
  const std::string& prefix() const { return prefix_; }
  bool ok() const { return error_.ok(); }
  const Status& error() const { return error_; }
  const std::string& param() const { return param_; }  // the field with the error
  std::vector<std::string> unknown() const;            // fields that were never read
  // One entry per read, in order, with repetitions.
  const std::vector<FieldNote>& notes() const { return notes_; }

 private:
  const json* find_as(const std::string& name, FieldNote::Kind kind);
  void wrong_type(const std::string& name, const char* wanted, const json& value);

  const json& object_;
  std::string prefix_;
  std::vector<FieldNote> notes_;
  std::vector<std::string> unknown_inside_;
  Status error_, cause_;  // with and without the field's name
  std::string param_;
};

}  // namespace fp4moe
