// What the handlers of plain routes use, and the parts that they share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "fp4moe/server.h"
#include "server/http/http.h"
#include "server/json.h"

namespace fp4moe {

struct RouteContext {
  const Engine& engine;
  const ServerConfig& config;
  int64_t started_at;  // seconds since 1970
};

HttpResponse json_response(const json& value);

// The served names; the first is the name in responses.
std::vector<std::string> served_names(const ModelInfo& info);
// The error for a name that is not served; it lists the served names.
Status unknown_model(const ModelInfo& info, const std::string& name);
// Reads "model": a served name, the model's path or "default"; any text with accept_any_model_name.
void check_model(const ModelInfo& info, const ServerConfig& config, Fields& fields);

}  // namespace fp4moe
