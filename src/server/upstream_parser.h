// UpstreamParser: the bytes of another server's HTTP answer, checked as they come; no connection.
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
  // Printable ASCII; of Retry-After and Allow empty what is not.
  std::string content_type, retry_after, allow;
  bool is_event_stream() const { return status == 200 && content_type.rfind("text/event-stream", 0) == 0; }
};

class UpstreamParser {
 public:
  // Of an answer's head, of a chunk's head and of a trailer.
  static constexpr uint32_t kMaxHeadBytes = 16 << 10;

  // `max_body_bytes`: of the decoded body; 0: any. The answer to a HEAD request has none.
  UpstreamParser(bool is_head_request, uint64_t max_body_bytes);

  // Takes the next bytes and appends what they hold of the body to `body`. kDataLoss, with the reason:
  // malformed, a status outside 200..599, or over a limit; nothing may follow. Holds at most kMaxHeadBytes
  // between two calls.
  Status read(std::string_view bytes, std::string& body);
  // The connection was closed. kUnavailable: before the end of the answer.
  Status read_end();

  bool has_head() const { return has_head_; }
  const UpstreamHead& head() const { return head_; }
  bool is_done() const { return is_done_; }

 private:
  Status take_head();

  boost::beast::http::response_parser<boost::beast::http::buffer_body> parser_;
  std::string pending_;  // not yet parsed: part of a line
  const uint64_t max_body_bytes_;
  uint64_t num_body_bytes_ = 0;
  UpstreamHead head_;
  bool has_bytes_ = false, has_head_ = false, is_done_ = false;
};

}  // namespace fp4moe
