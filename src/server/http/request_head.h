// RequestHead: the head of an HTTP/1.x request, checked so that it has only one interpretation under RFC
// 9112.
#pragma once

#include <boost/beast/http/fields.hpp>
#include <boost/beast/http/message.hpp>
#include <cstdint>
#include <optional>
#include <string_view>

#include "fp4moe/status.h"
#include "server/http/http.h"

namespace fp4moe {

struct RequestHead {
  HttpRequest request;  // without the body
  std::optional<uint64_t> content_length;
  bool is_chunked = false;
  bool expects_continue = false;
  std::string content_encoding;  // empty if the body is not encoded
  bool has_body() const { return is_chunked || content_length.value_or(0) > 0; }
};

// kInvalidArgument where two parsers could disagree on the bounds, host or target: a Transfer-Encoding other
// than "chunked", or together with Content-Length, or in HTTP/1.0; several Content-Length or Host lines; no
// Host in HTTP/1.1; a target that is neither a path nor an http URL. kUnsupported: an expectation other than
// 100-continue.
Result<RequestHead> read_head(const boost::beast::http::header<true, boost::beast::http::fields>& header);

// Whether a header line is continued on the next line (obs-fold).
bool has_folded_line(std::string_view head);

}  // namespace fp4moe
