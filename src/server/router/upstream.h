// UpstreamCall: one HTTP request to another server, whose response arrives in pieces.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>

#include "fp4moe/status.h"
#include "server/http/server_url.h"
#include "server/router/upstream_parser.h"

namespace fp4moe {

struct UpstreamRequest {
  ServerUrl url;
  std::string method, target;                      // target: path and query
  std::string authorization, api_key, request_id;  // header values; empty: not sent
  std::string body;
  double seconds = 0;        // until the response is complete, or for an event stream its head; 0: no limit
  double quiet_seconds = 0;  // between two pieces of the request or of a started response; 0: no limit
  uint64_t max_body_bytes = 0;  // of the response; 0: no limit
  // After each on_bytes, reads nothing until read_on(), so that bytes wait in the network and not in memory.
  bool is_paced = false;
};

// Called on the io_context's threads, one at a time: on_head, any number of on_bytes, on_end. on_end may be
// the only one. Its status: kUnavailable if the connection failed, kDeadline after `seconds` or
// `quiet_seconds`, kDataLoss if UpstreamParser refused the response, kInternal if the connection broke later
// or a callback threw.
struct UpstreamEvents {
  std::function<void(const UpstreamHead&)> on_head;
  std::function<void(std::string)> on_bytes;
  std::function<void(const Status&)> on_end;
};

class UpstreamCall {
 public:
  virtual ~UpstreamCall() = default;
  // From any thread: closes the connection. No further callback starts, but one may still be running.
  virtual void cancel() = 0;
  // From any thread, for a paced call: once after each on_bytes.
  virtual void read_on() = 0;
};

// Uses its own connection, closed afterwards. The call keeps itself alive until it ends.
std::shared_ptr<UpstreamCall> start_upstream(boost::asio::io_context& io, UpstreamRequest request,
                                             UpstreamEvents events);

}  // namespace fp4moe
