#include "server/router/upstream_parser.h"

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>

namespace fp4moe {
namespace {

namespace http = boost::beast::http;
using boost::system::error_code;

constexpr size_t kMaxFieldBytes = 256;

// A header field's value; empty if it is too long or not printable ASCII.
std::string field_value(boost::beast::string_view value) {
  const auto is_plain = [](char c) { return c >= ' ' && c < '\x7f'; };
  const bool usable = value.size() <= kMaxFieldBytes && std::all_of(value.begin(), value.end(), is_plain);
  return usable ? std::string(value) : "";
}

}  // namespace

UpstreamParser::UpstreamParser(bool is_head_request, uint64_t max_body_bytes)
    : max_body_bytes_(max_body_bytes) {
  parser_.header_limit(kMaxHeadBytes);
  parser_.body_limit(boost::none);
  parser_.skip(is_head_request);
}

Status UpstreamParser::read(std::string_view bytes, std::string& body) {
  has_bytes_ = has_bytes_ || !bytes.empty();
  pending_ += bytes;
  std::string_view left = pending_;
  std::array<char, 4096> piece;
  while (!is_done_ && !left.empty()) {
    auto& out = parser_.get().body();
    out.data = piece.data();
    out.size = piece.size();
    error_code error;
    const size_t used = parser_.put(boost::asio::buffer(left.data(), left.size()), error);
    const size_t num_body = parser_.is_header_done() ? piece.size() - out.size : 0;
    left.remove_prefix(used);
    body.append(piece.data(), num_body);
    num_body_bytes_ += num_body;
    if (error == http::error::header_limit ||
        (error == http::error::need_more && left.size() > kMaxHeadBytes))
      return data_loss("a header of its response has more than " + std::to_string(kMaxHeadBytes) + " bytes");
    if (error && error != http::error::need_more && error != http::error::need_buffer)
      return data_loss("its response is not HTTP/1.1: " + error.message());
    if (parser_.is_header_done() && !has_head_)
      if (Status status = take_head(); !status.ok()) return status;
    if (max_body_bytes_ > 0 && num_body_bytes_ > max_body_bytes_)
      return data_loss("its response has more than " + std::to_string(max_body_bytes_) + " bytes");
    is_done_ = parser_.is_done();
    if (error == http::error::need_more || (used == 0 && num_body == 0)) break;
  }
  pending_.erase(0, pending_.size() - left.size());
  return {};
}

Status UpstreamParser::take_head() {
  const auto& message = parser_.get();
  head_.status = static_cast<int>(message.result_int());
  if (head_.status < 200 || head_.status > 599)
    return data_loss("its response has status " + std::to_string(head_.status) + "; it must be 200 to 599");
  head_.content_type = field_value(message[http::field::content_type]);
  if (head_.content_type.empty()) head_.content_type = "application/octet-stream";
  head_.retry_after = field_value(message[http::field::retry_after]);
  head_.allow = field_value(message[http::field::allow]);
  head_.request_id = field_value(message["x-request-id"]);
  has_head_ = true;
  return {};
}

Status UpstreamParser::read_end() {
  if (is_done_) return {};
  if (has_bytes_ && pending_.empty()) {
    error_code error;
    parser_.put_eof(error);
    is_done_ = !error && parser_.is_done();
  }
  return is_done_ ? Status() : unavailable("the connection was closed before the end of the response");
}

}  // namespace fp4moe
