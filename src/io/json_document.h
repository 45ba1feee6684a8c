// JSON from files we do not trust, parsed without exceptions. Only for the .cc files of this folder: no
// public header shows nlohmann's types.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

using Json = nlohmann::json;

// kDataLoss, naming `what` and the place: not JSON, nested deeper than 64, a key twice in one object, or
// more than 2^24 values.
Result<Json> parse_json(std::string_view text, const std::string& what);

// The value as JSON text for a message, cut after 60 bytes.
std::string json_brief(const Json& value);

}  // namespace fp4moe
