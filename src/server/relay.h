// Relay: one request of a router's client on its way to a node, and the answer's way back.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>

#include "server/http.h"
#include "server/node_table.h"

namespace fp4moe {

struct RelayContext {
  boost::asio::io_context& io;
  NodeTable& nodes;
  const RouterConfig& config;  // its limits
  std::function<void(LogLevel, const std::string&)> log;
  std::atomic<int64_t>& num_live;    // requests that are not over
  std::atomic<int64_t>& held_bytes;  // of answers that are not whole yet
};

// Answers on `exchange` what a decode node answers; from the exchange's handler. A generation request gets
// the address of the prefill node that computes its prompts. A stream is passed on as it comes, by whole
// events; any other answer once it is whole. 503: no node is up, or the router holds too many bytes of
// answers; 502: the answer is malformed or too long, or the node died before it was whole; 504: a deadline
// passed. A stream that breaks ends with an error event.
void relay_generation(const RelayContext& context, std::shared_ptr<HttpExchange> exchange);
void relay_plain(const RelayContext& context, std::shared_ptr<HttpExchange> exchange);

}  // namespace fp4moe
