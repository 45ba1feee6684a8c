// JSON from files and peers we do not trust, parsed without exceptions. Only for the .cc files of this folder
// and of engine/: no public header shows nlohmann's types.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

using Json = nlohmann::json;

// What a document may hold. An array or object costs some 64 bytes of memory, a key some 100, any other value
// 16.
struct JsonLimits {
  size_t max_depth = 64;
  int64_t max_values = int64_t{1} << 24;      // arrays and objects included
  int64_t max_containers = int64_t{1} << 24;  // arrays and objects
  int64_t max_keys = int64_t{1} << 24;        // of all objects together
};

// kDataLoss, naming `what` and the place: not JSON, over a limit, or a key twice in one object. The limits
// are checked by a first, iterative pass over the text, before anything is built.
Result<Json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits = {});

// The value as JSON text for a message, cut after 60 bytes.
std::string json_brief(const Json& value);

}  // namespace fp4moe
