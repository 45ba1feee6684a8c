// UpstreamCall: one HTTP request to another server, whose answer comes piece by piece.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>

#include "fp4moe/status.h"
#include "server/server_url.h"
#include "server/upstream_parser.h"

namespace fp4moe {

struct UpstreamRequest {
  ServerUrl url;
  std::string method, target;          // target: path and query
  std::string authorization, api_key;  // headers, unless empty
  std::string body;
  double seconds = 0;        // until the answer is whole, of an event stream until its head; 0: any
  double quiet_seconds = 0;  // between two pieces of the request, and of the answer once it has begun; 0: any
  uint64_t max_body_bytes = 0;  // of the answer; 0: any
  // After each on_bytes nothing is read until read_on(): so that bytes wait in the network, not in memory.
  bool is_paced = false;
};

// Called on the io_context's threads, one at a time: on_head, on_bytes as often as they come, on_end. on_end
// may be the only one: kUnavailable if there was no connection, kDeadline after `seconds` or `quiet_seconds`,
// kDataLoss for an answer that UpstreamParser refuses, kInternal if the connection broke later. What one of
// them throws ends the call with kInternal.
struct UpstreamEvents {
  std::function<void(const UpstreamHead&)> on_head;
  std::function<void(std::string)> on_bytes;
  std::function<void(const Status&)> on_end;
};

class UpstreamCall {
 public:
  virtual ~UpstreamCall() = default;
  // From any thread: closes the connection; what has not been called yet is not called any more, but what is
  // being called may be.
  virtual void cancel() = 0;
  // From any thread: of a paced call, once for each on_bytes.
  virtual void read_on() = 0;
};

// Lives until its end, whoever else holds it. A connection of its own, closed afterwards.
std::shared_ptr<UpstreamCall> start_upstream(boost::asio::io_context& io, UpstreamRequest request,
                                             UpstreamEvents events);

}  // namespace fp4moe
