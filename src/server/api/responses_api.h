// OpenAI's Responses API.
#pragma once

#include "fp4moe/engine.h"
#include "server/api/generation.h"
#include "server/api/response_items.h"
#include "server/http/http.h"
#include "server/json.h"

namespace fp4moe {

// POST /v1/responses. Errors are recorded in `fields`; if there is one, discard the returned call.
GenerationCall parse_responses(const Engine& engine, const ResponseAccess& access, Fields& fields);

constexpr const char* kResponsesPath = "/v1/responses/";

// The requests about a stored response: GET and DELETE /v1/responses/ID, GET /v1/responses/ID/input_items and
// POST /v1/responses/ID/cancel.
HttpResponse stored_response(ResponseStore& store, const std::string& owner, const HttpRequest& request);

}  // namespace fp4moe
