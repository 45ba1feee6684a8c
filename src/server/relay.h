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
  std::function<void(LogLevel, const std::string&)> log;
  std::atomic<int64_t>& num_live;  // requests that are not over
};

// Answers on `exchange` what a decode node answers; from the exchange's handler. A generation request is told
// which prefill node computes its prompts. 503: no node is up; 502: the node died before its answer was
// whole, after which a stream ends with an error event.
void relay_generation(const RelayContext& context, std::shared_ptr<HttpExchange> exchange);
void relay_plain(const RelayContext& context, std::shared_ptr<HttpExchange> exchange);

}  // namespace fp4moe
