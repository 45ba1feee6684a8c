// UpstreamCall: one HTTP request to another server, whose answer comes piece by piece.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>

#include "fp4moe/status.h"
#include "server/server_url.h"

namespace fp4moe {

struct UpstreamRequest {
  ServerUrl url;
  std::string method, target;          // target: path and query
  std::string authorization, api_key;  // headers, unless empty
  std::string body;
  double seconds = 0;  // for the whole answer; 0: any
};

struct UpstreamHead {
  int status = 0;
  std::string content_type, retry_after, allow;
};

// Called on the io_context's threads, one at a time: on_head, on_bytes as often as they come, on_end. on_end
// may be the only one: kUnavailable if there was no connection, kDeadline after `seconds`, kInternal if the
// connection broke later.
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
};

// Lives until its end, whoever else holds it. A connection of its own, closed afterwards.
std::shared_ptr<UpstreamCall> start_upstream(boost::asio::io_context& io, UpstreamRequest request,
                                             UpstreamEvents events);

}  // namespace fp4moe
