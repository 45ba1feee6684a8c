// The server's description of itself: OpenAPI 3.1.
#pragma once

#include "fp4moe/engine.h"
#include "server/json.h"

namespace fp4moe {

// openapi.json plus the fields of the generation routes, with the types and bounds that the parsers enforce,
// so that they are defined once.
json openapi_document(const Engine& engine);

}  // namespace fp4moe
