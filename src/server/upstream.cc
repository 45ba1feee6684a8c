#include "server/upstream.h"

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/buffer_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <chrono>
#include <utility>

namespace fp4moe {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::chrono::seconds kConnectTime(5);

class Call final : public UpstreamCall, public std::enable_shared_from_this<Call> {
 public:
  Call(asio::io_context& io, UpstreamRequest request, UpstreamEvents events)
      : given_(std::move(request)),
        events_(std::move(events)),
        resolver_(asio::make_strand(io)),
        stream_(resolver_.get_executor()) {}

  void start() {
    resolver_.async_resolve(given_.url.host, given_.url.port,
                            [self = shared_from_this()](error_code error, const auto& found) {
                              if (error) return self->end(StatusCode::kUnavailable, error);
                              self->connect(found);
                            });
  }

  void cancel() override {
    asio::post(resolver_.get_executor(), [self = shared_from_this()] {
      self->events_ = {};
      self->resolver_.cancel();
      self->stream_.close();
    });
  }

 private:
  void connect(const tcp::resolver::results_type& found) {
    stream_.expires_after(kConnectTime);
    stream_.async_connect(found, [self = shared_from_this()](error_code error, const tcp::endpoint&) {
      if (error) return self->end(StatusCode::kUnavailable, error);
      self->send();
    });
  }

  void send() {
    error_code ignored;
    stream_.socket().set_option(tcp::no_delay(true), ignored);
    stream_.socket().set_option(asio::socket_base::keep_alive(true), ignored);
    if (given_.seconds > 0)
      stream_.expires_after(std::chrono::milliseconds(static_cast<int64_t>(1000 * given_.seconds)));
    else
      stream_.expires_never();
    message_.method_string(given_.method);
    message_.target(given_.url.prefix + given_.target);
    message_.set(http::field::host, given_.url.host + ":" + given_.url.port);
    message_.set(http::field::connection, "close");
    message_.set(http::field::content_type, "application/json");
    if (!given_.authorization.empty()) message_.set(http::field::authorization, given_.authorization);
    if (!given_.api_key.empty()) message_.set("x-api-key", given_.api_key);
    message_.body() = std::move(given_.body);
    message_.prepare_payload();
    http::async_write(stream_, message_, [self = shared_from_this()](error_code error, size_t) {
      if (error) return self->end(StatusCode::kInternal, error);
      self->read_head();
    });
  }

  void read_head() {
    parser_.body_limit(boost::none);
    parser_.skip(given_.method == "HEAD");
    http::async_read_header(stream_, buffer_, parser_, [self = shared_from_this()](error_code error, size_t) {
      if (error) return self->end(StatusCode::kInternal, error);
      const auto& head = self->parser_.get();
      if (self->events_.on_head)
        self->events_.on_head(
            {static_cast<int>(head.result_int()), std::string(head[http::field::content_type]),
             std::string(head[http::field::retry_after]), std::string(head[http::field::allow])});
      self->read_some();
    });
  }

  void read_some() {
    if (parser_.is_done()) return end({});
    parser_.get().body().data = piece_.data();
    parser_.get().body().size = piece_.size();
    http::async_read_some(stream_, buffer_, parser_, [self = shared_from_this()](error_code error, size_t) {
      if (error == http::error::need_buffer) error = {};
      if (error) return self->end(StatusCode::kInternal, error);
      const size_t num_bytes = self->piece_.size() - self->parser_.get().body().size;
      if (num_bytes > 0 && self->events_.on_bytes)
        self->events_.on_bytes(std::string(self->piece_.data(), num_bytes));
      self->read_some();
    });
  }

  void end(StatusCode code, error_code error) {
    if (error == beast::error::timeout && code != StatusCode::kUnavailable) code = StatusCode::kDeadline;
    end({code, error == http::error::end_of_stream || error == http::error::partial_message
                   ? "the connection was closed before the end of the answer"
                   : error.message()});
  }

  void end(const Status& status) {
    stream_.close();
    if (const auto on_end = std::exchange(events_, {}).on_end) on_end(status);
  }

  UpstreamRequest given_;
  UpstreamEvents events_;
  tcp::resolver resolver_;
  beast::tcp_stream stream_;
  http::request<http::string_body> message_;
  http::response_parser<http::buffer_body> parser_;
  beast::flat_buffer buffer_;
  std::array<char, 16 << 10> piece_;
};

}  // namespace

std::shared_ptr<UpstreamCall> start_upstream(asio::io_context& io, UpstreamRequest request,
                                             UpstreamEvents events) {
  auto call = std::make_shared<Call>(io, std::move(request), std::move(events));
  call->start();
  return call;
}

}  // namespace fp4moe
