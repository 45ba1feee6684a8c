// Translates the fields of POST /v1/responses into those of a chat completion.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "server/api/response_items.h"
#include "server/api/response_store.h"
#include "server/api/response_tools.h"
#include "server/json.h"

namespace fp4moe {

struct ResponsesRequest {
  json chat = json::object();  // the fields for read_chat_input() and add_chat()
  json head = json::object();  // the response object without its id, times, status, output and usage
  ResponseTools tools;         // without the parts that `chat` and `head` have
  std::vector<json> input;     // this request's items
  std::shared_ptr<const Turn> previous;
  bool is_stored = false, stream = false;
};

// Records errors in `fields`, named by the fields of /v1/responses.
ResponsesRequest read_responses_request(const Engine& engine, const ResponseAccess& access, Fields& fields);

// Returns the name in /v1/responses of the chat field `chat`, or "" if /v1/responses has no such field.
std::string responses_name(const ResponsesRequest& request, const std::string& chat);

}  // namespace fp4moe
