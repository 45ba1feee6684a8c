// The server's own description: OpenAPI 3.1.
#pragma once

#include "fp4moe/engine.h"
#include "server/json.h"

namespace fp4moe {

// openapi.json with the fields that the generation routes read, their types and bounds as the parsers ask for
// them, so that nothing is written twice.
json openapi_document(const Engine& engine);

}  // namespace fp4moe
