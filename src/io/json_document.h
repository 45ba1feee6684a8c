// JSON from untrusted files and peers, parsed without exceptions. Only for the .cc files in this folder and
// in engine/: no public header exposes nlohmann's types.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

using Json = nlohmann::json;

// Limits on a document. An array or object takes about 64 bytes of memory, a key about 100 and any other
// value 16.
struct JsonLimits {
  size_t max_depth = 64;
  int64_t max_values = int64_t{1} << 24;      // including arrays and objects
  int64_t max_containers = int64_t{1} << 24;  // arrays and objects
  int64_t max_keys = int64_t{1} << 24;        // summed over all objects
};

// Parses `text`. kDataLoss, naming `what` and the problem: not JSON (with the position), over a limit, or a
// duplicate key. A first, iterative pass over the text checks the limits before anything is built.
Result<Json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits = {});

// Returns the value as JSON text for a message, cut to 60 bytes.
std::string json_brief(const Json& value);

}  // namespace fp4moe
