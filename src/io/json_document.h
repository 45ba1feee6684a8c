// JSON from untrusted files and peers, parsed without exceptions. Only for the .cc files of this folder and
// of engine/: no public header exposes nlohmann's types.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

using Json = nlohmann::json;

// Limits of a document. An array or object costs about 64 bytes of memory, a key about 100, any other value
// 16.
struct JsonLimits {
  size_t max_depth = 64;
  int64_t max_values = int64_t{1} << 24;      // including arrays and objects
  int64_t max_containers = int64_t{1} << 24;  // arrays and objects
  int64_t max_keys = int64_t{1} << 24;        // summed over all objects
};

// kDataLoss, naming `what` and the position: not JSON, over a limit, or a duplicate key. The limits are
// checked by a first, iterative pass over the text, before anything is built.
Result<Json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits = {});

// The value as JSON text for a message, cut to 60 bytes.
std::string json_brief(const Json& value);

}  // namespace fp4moe
