#include "server/http/request_head.h"

#include <algorithm>
#include <boost/beast/core/string.hpp>
#include <charconv>
#include <string>

#include "server/http/request_id.h"

namespace fp4moe {
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

using Header = http::header<true, http::fields>;

constexpr size_t kMaxHostBytes = 255 + 6;  // longest name and ":port"

std::string value_of(const Header& header, http::field field) { return std::string(header[field]); }

bool has_scheme(std::string_view target, std::string_view scheme) {
  return target.size() > scheme.size() &&
         beast::iequals({target.data(), scheme.size()}, {scheme.data(), scheme.size()});
}

// Splits a target in origin form ("/path?query"), absolute form ("http://host/path?query") or "*". An
// absolute target's authority replaces the Host header (RFC 9112, section 3.2.2).
Status read_target(std::string_view target, HttpRequest& request) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!has_scheme(target, scheme)) continue;
    target.remove_prefix(scheme.size());
    const size_t end = std::min(target.find_first_of("/?"), target.size());
    request.host = target.substr(0, end);
    if (request.host.empty() || request.host.find('@') != std::string::npos)
      return invalid_argument("the request target is a URL without a host or with user information");
    target.remove_prefix(end);
    if (target.empty() || target.front() == '?') request.path = "/";
  }
  if (request.path.empty() && target != "*" && !target.starts_with('/'))
    return invalid_argument("the request target is neither a path nor an http URL");
  const size_t path_size = std::min(target.find('?'), target.size());
  if (request.path.empty()) request.path = target.substr(0, path_size);
  if (path_size < target.size()) request.query = target.substr(path_size + 1);
  return {};
}

Status read_host(const Header& header, HttpRequest& request) {
  const size_t count = header.count(http::field::host);
  if (count > 1)
    return invalid_argument("the request has " + std::to_string(count) +
                            " Host headers; exactly one is allowed");
  if (count == 0 && header.version() >= 11)
    return invalid_argument("an HTTP/1.1 request needs a Host header");
  const std::string host = value_of(header, http::field::host);
  if (host.size() > kMaxHostBytes || host.find_first_of(" \t,/@?#") != std::string::npos)
    return invalid_argument("the Host header is not a host with an optional port");
  if (request.host.empty()) request.host = host;  // not set by an absolute target
  return {};
}

// RFC 9112, sections 6.1 to 6.3.
Status read_length(const Header& header, RequestHead& head) {
  const size_t lengths = header.count(http::field::content_length);
  const size_t encodings = header.count(http::field::transfer_encoding);
  if (encodings > 0) {
    if (lengths > 0) return invalid_argument("the request has both Transfer-Encoding and Content-Length");
    if (header.version() < 11) return invalid_argument("an HTTP/1.0 request must not have Transfer-Encoding");
    if (encodings > 1 || !beast::iequals(header[http::field::transfer_encoding], "chunked"))
      return invalid_argument(
          "there must be exactly one Transfer-Encoding header, with the value \"chunked\"");
    head.is_chunked = true;
  }
  if (lengths == 0) return {};
  const std::string text = value_of(header, http::field::content_length);
  uint64_t length = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
  if (lengths > 1 || error != std::errc() || end != text.data() + text.size())
    return invalid_argument(
        "there must be exactly one Content-Length header, with a decimal number below 2^64");
  head.content_length = length;
  return {};
}

}  // namespace

Result<RequestHead> read_head(const Header& header) {
  RequestHead head;
  HttpRequest& request = head.request;
  const auto target = header.target();
  for (const Status& status : {read_target({target.data(), target.size()}, request),
                               read_host(header, request), read_length(header, head)})
    if (!status.ok()) return status;
  const std::string expect = value_of(header, http::field::expect);
  head.expects_continue = header.version() >= 11 && beast::iequals(expect, "100-continue");
  if (!expect.empty() && header.version() >= 11 && !head.expects_continue)
    return unsupported("Expect: only 100-continue is supported");
  head.content_encoding = value_of(header, http::field::content_encoding);
  if (beast::iequals(head.content_encoding, "identity")) head.content_encoding.clear();
  request.method = std::string(header.method_string());
  request.authorization = value_of(header, http::field::authorization);
  request.api_key = std::string(header["x-api-key"]);
  if (const std::string id(header["x-request-id"]); is_request_id(id)) request.request_id = id;
  request.origin = value_of(header, http::field::origin);
  request.access_control_request_headers = value_of(header, http::field::access_control_request_headers);
  return head;
}

bool has_folded_line(std::string_view head) {
  for (size_t at = head.find("\r\n"); at != head.npos; at = head.find("\r\n", at + 2))
    if (at + 2 < head.size() && (head[at + 2] == ' ' || head[at + 2] == '\t')) return true;
  return false;
}

}  // namespace fp4moe
