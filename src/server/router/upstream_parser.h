// UpstreamParser: checks and parses another server's HTTP response incrementally, without a connection.
#pragma once

#include <boost/beast/http/buffer_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <cstdint>
#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

struct UpstreamHead {
  int status = 0;  // 200..599
  // Printable ASCII; an invalid Retry-After, Allow or X-Request-Id becomes empty.
  std::string content_type, retry_after, allow, request_id;
  bool is_event_stream() const { return status == 200 && content_type.rfind("text/event-stream", 0) == 0; }
};

class UpstreamParser {
 public:
  // Limit for the response's head, for a chunk's head and for a trailer.
  static constexpr uint32_t kMaxHeadBytes = 16 << 10;

  // `max_body_bytes`: limit for the decoded body; 0: none. The response to a HEAD request has no body.
  UpstreamParser(bool is_head_request, uint64_t max_body_bytes);

  // Parses the next bytes and appends their body bytes to `body`. kDataLoss, with the reason: malformed, a
  // status outside 200..599, or over a limit; don't call it again. Buffers at most kMaxHeadBytes between two
  // calls.
  Status read(std::string_view bytes, std::string& body);
  // Call when the connection was closed. kUnavailable: the response is incomplete.
  Status read_end();

  bool has_head() const { return has_head_; }
  const UpstreamHead& head() const { return head_; }
  bool is_done() const { return is_done_; }

 private:
  Status take_head();

  boost::beast::http::response_parser<boost::beast::http::buffer_body> parser_;
  std::string pending_;  // unparsed bytes: part of a line
  const uint64_t max_body_bytes_;
  uint64_t num_body_bytes_ = 0;
  UpstreamHead head_;
  bool has_bytes_ = false, has_head_ = false, is_done_ = false;
};

}  // namespace fp4moe
