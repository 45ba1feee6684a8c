// Typed, checked access to the keys of one JSON object. Only for the .cc files in this folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/status.h"
#include "io/json_document.h"

namespace fp4moe {

// Reads keys into variables, which keep their value (the default) if the key is absent or null. Keeps the
// first error and ignores all further reads, so a caller checks once. Messages name the file, the key, the
// value and the legal values.
class JsonFields {
 public:
  // `object` must outlive this reader; `where` names it in messages, such as "config.json: rope_scaling".
  JsonFields(const Json& object, std::string where);

  struct IntRange {
    int64_t min, max;
  };
  struct RealRange {
    double min, max;  // inclusive; NaN and infinity are never legal
  };
  void read_int(const char* key, int64_t& value, IntRange legal);
  void read_real(const char* key, double& value, RealRange legal);
  void read_bool(const char* key, bool& value);
  void read_string(const char* key, std::string& value);
  void read_strings(const char* key, std::vector<std::string>& values);
  // Accepts a number or an array of numbers.
  void read_ints(const char* key, std::vector<int64_t>& values, IntRange legal);

  bool has(const char* key) const { return find(key) != nullptr; }        // present and not null
  bool contains(const char* key) const { return object_.contains(key); }  // present, possibly null
  // Returns null if the key is absent, null or not an object (which is an error).
  const Json* object(const char* key);
  // Records kInvalidArgument "`where`: `problem`" if `condition` is false.
  void require(bool condition, const std::string& problem);
  void require_key(const char* key) { require(has(key), std::string(key) + " is missing"); }
  void fail(Status status);

  const std::string& where() const { return where_; }
  const Status& status() const { return status_; }

 private:
  const Json* find(const char* key) const;
  void wrong(const char* key, const Json& value, const std::string& legal);

  const Json& object_;
  std::string where_;
  Status status_;
};

}  // namespace fp4moe
