// Relays one client request of a router to a node, and the node's response back.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>

#include "server/http/errors.h"
#include "server/http/http.h"
#include "server/router/node_table.h"

namespace fp4moe {

// Each decode node could find only the responses that it stored itself.
inline constexpr const char* kNoStoredResponses =
    "a router has no stored responses: send the whole conversation as input";

struct RelayContext {
  boost::asio::io_context& io;
  NodeTable& nodes;
  const RouterConfig& config;  // its limits
  std::function<void(LogLevel, const std::string&)> log;
  std::function<void(size_t node)> check_node;  // begins a health check now; callable from any thread
  std::atomic<int64_t>& num_live;               // relays not yet destroyed
  std::atomic<int64_t>& held_bytes;             // bytes of responses collected and not yet forwarded
};

// Forwards a request to a decode node and its response to `exchange`; call it from the exchange's handler. A
// generation request gets the address of the prefill node that computes its prompts, and the responses of
// /v1/responses are not stored. An event stream is forwarded event by event, any other response once it is
// complete. Errors: 503 no node is up, or the router holds too many response bytes; 502 the response is
// malformed or too long, or the node died before its end; 504 a deadline passed. A stream that breaks ends
// with an error event.
void relay_generation(const RelayContext& context, std::shared_ptr<HttpExchange> exchange, ErrorShape errors);
void relay_plain(const RelayContext& context, std::shared_ptr<HttpExchange> exchange, ErrorShape errors);

}  // namespace fp4moe
