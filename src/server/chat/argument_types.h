// The JSON that a parameter's plain text stands for, by the functions' schemas.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "server/json.h"

namespace fp4moe {

class ArgumentTypes {
 public:
  // `parameters` is the function's JSON Schema.
  void add(const std::string& function, const json& parameters);

  bool has(const std::string& function) const { return parameters_.contains(function); }
  bool has(const std::string& function, const std::string& parameter) const;
  // Whether the parameter is always a string, so that its text needs no parsing. False if unknown.
  bool is_text(const std::string& function, const std::string& parameter) const;
  // Whether the parameter can be a string. True if unknown.
  bool may_be_text(const std::string& function, const std::string& parameter) const;
  // Whether white space around the parameter's text is dropped: the schema limits the text (by an enum, a
  // length or a pattern), and the grammar of forced calls allows white space around such texts.
  bool is_trimmed(const std::string& function, const std::string& parameter) const;
  // Returns the JSON for a parameter that is not always a string: `text` itself without white space around
  // it, or a string with `text` if it is not JSON, or is JSON of a type that the schema excludes while it
  // allows strings. If the schema excludes strings, Python's True, False and None are also read: the
  // templates of some models render earlier calls with them.
  std::string to_json(const std::string& function, const std::string& parameter, std::string_view text) const;

 private:
  struct Parameter {
    unsigned types;  // a set of JSON types
    bool limits_text;
  };
  Parameter find(const std::string& function, const std::string& parameter) const;

  std::map<std::string, std::map<std::string, Parameter>> parameters_;  // [function][parameter]
};

// `text` as the inside of a JSON string. Escapes byte by byte, so a text may be escaped in pieces.
std::string json_escaped(std::string_view text);

}  // namespace fp4moe
