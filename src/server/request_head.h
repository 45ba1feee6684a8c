// RequestHead: the head of an HTTP/1.x request, checked by the rules of RFC 9112 that keep one reading of it.
#pragma once

#include <boost/beast/http/fields.hpp>
#include <boost/beast/http/message.hpp>
#include <cstdint>
#include <optional>
#include <string_view>

#include "fp4moe/status.h"
#include "server/http.h"

namespace fp4moe {

struct RequestHead {
  HttpRequest request;  // without the body
  std::optional<uint64_t> content_length;
  bool is_chunked = false;
  bool expects_continue = false;
  bool has_body() const { return is_chunked || content_length.value_or(0) > 0; }
};

// kInvalidArgument where two readers could find different bounds, hosts or targets: a Transfer-Encoding other
// than "chunked", one beside Content-Length or in HTTP/1.0, several Content-Length or Host lines, no Host in
// HTTP/1.1, a target that is neither a path nor an http URL. kUnsupported: an expectation other than
// 100-continue.
Result<RequestHead> read_head(const boost::beast::http::header<true, boost::beast::http::fields>& header);

// Whether the bytes of a head have a header line that is continued on the next one (obs-fold).
bool has_folded_line(std::string_view head);

}  // namespace fp4moe
