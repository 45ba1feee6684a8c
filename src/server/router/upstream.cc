#include "server/router/upstream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "server/http/request_id.h"

namespace fp4moe {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr double kConnectSeconds = 5;     // including name resolution
constexpr size_t kSendBytes = 256 << 10;  // per write: quiet_seconds applies to each

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// TCP keepalive: a dead peer is detected after about 15 s, whatever the deadlines.
void set_options(tcp::socket& socket) {
  error_code ignored;
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::keep_alive(true), ignored);
  const struct { int name, value; } options[] = {{TCP_KEEPIDLE, 5}, {TCP_KEEPINTVL, 5}, {TCP_KEEPCNT, 2}};
  for (const auto& option : options)
    ::setsockopt(socket.native_handle(), IPPROTO_TCP, option.name, &option.value, sizeof option.value);
}

std::string print(const UpstreamRequest& request) {
  std::string text = request.method + " " + request.url.prefix + request.target +
                     " HTTP/1.1\r\nHost: " + request.url.authority() +
                     "\r\nConnection: close\r\nContent-Type: application/json\r\n";
  if (!request.authorization.empty()) text += "Authorization: " + request.authorization + "\r\n";
  if (!request.api_key.empty()) text += "x-api-key: " + request.api_key + "\r\n";
  text += request_id_header(request.request_id);
  if (!request.body.empty() || request.method == "POST")
    text += "Content-Length: " + std::to_string(request.body.size()) + "\r\n";
  return text + "\r\n" + request.body;
}

class Call final : public UpstreamCall, public std::enable_shared_from_this<Call> {
  // Wraps `task` as a handler: called with this call and the handler's arguments, unless the call is over.
  template <class Task>
  auto guarded(Task task) {
    return [ self = shared_from_this(), task = std::move(task) ](
        const auto&... results) requires std::is_invocable_v<const Task&, Call&, decltype(results)...> {
      if (self->is_over_) return;
      try {
        task(*self, results...);
      } catch (const std::exception& error) {  // out of memory, or a bug here
        self->end(internal_error(error.what()));
      }
    };
  }

 public:
  Call(asio::io_context& io, UpstreamRequest request, UpstreamEvents events)
      : given_(std::move(request)),
        events_(std::move(events)),
        socket_(asio::make_strand(io)),
        resolver_(socket_.get_executor()),
        timer_(socket_.get_executor()),
        parser_(given_.method == "HEAD", given_.max_body_bytes) {}

  void start() {
    asio::post(socket_.get_executor(), guarded([](Call& call) { call.resolve(); }));
  }

  void cancel() override {
    asio::post(socket_.get_executor(), [self = shared_from_this()] {
      self->events_ = {};
      self->close();
    });
  }

  void read_on() override {
    asio::post(socket_.get_executor(), guarded([](Call& call) {
                 if (!call.is_over_) call.read();
               }));
  }

 private:
  void resolve() {
    total_deadline_ =
        given_.seconds > 0 ? Clock::now() + to_duration(given_.seconds) : Clock::time_point::max();
    wait_at_most(kConnectSeconds, "no connection within ");
    error_code not_numeric;
    const asio::ip::address address = asio::ip::make_address(given_.url.host, not_numeric);
    if (!not_numeric)
      return connect(std::array{tcp::endpoint(address, static_cast<uint16_t>(std::stoi(given_.url.port)))});
    resolver_.async_resolve(
        given_.url.host, given_.url.port,
        guarded([](Call& call, error_code error, const tcp::resolver::results_type& found) {
          if (error) return call.end(unavailable(error.message()));
          call.connect(found);
        }));
  }

  template <class Endpoints>
  void connect(const Endpoints& endpoints) {
    for (const auto& endpoint : endpoints) endpoints_.push_back(endpoint);
    asio::async_connect(socket_, endpoints_, guarded([](Call& call, error_code error, const tcp::endpoint&) {
                          if (error) return call.end(unavailable(error.message()));
                          set_options(call.socket_);
                          call.is_connected_ = true;
                          call.message_ = print(call.given_);
                          call.given_.body = {};
                          call.send();
                        }));
  }

  void send() {
    if (num_sent_ == message_.size()) {
      message_ = {};
      return read();
    }
    wait_at_most(given_.quiet_seconds, "accepted no bytes of the request for ");
    socket_.async_write_some(
        asio::buffer(message_.data() + num_sent_, std::min(kSendBytes, message_.size() - num_sent_)),
        guarded([](Call& call, error_code error, size_t num_bytes) {
          call.num_sent_ += num_bytes;
          if (error) call.num_sent_ = call.message_.size();  // the server may have responded before it closed
          call.send();
        }));
  }

  void read() {
    wait_at_most(has_begun_ ? given_.quiet_seconds : 0, "sent nothing for ");
    socket_.async_read_some(asio::buffer(piece_), guarded([](Call& call, error_code error, size_t num_bytes) {
                              if (error == asio::error::eof) return call.end(call.parser_.read_end());
                              if (error) return call.end(internal_error(error.message()));
                              call.take({call.piece_.data(), num_bytes});
                            }));
  }

  void take(std::string_view bytes) {
    has_begun_ = true;
    const bool had_head = parser_.has_head();
    std::string body;
    const Status status = parser_.read(bytes, body);
    if (parser_.has_head() && !had_head) {
      if (parser_.head().is_event_stream()) total_deadline_ = Clock::time_point::max();
      if (events_.on_head) events_.on_head(parser_.head());
    }
    const bool waits = given_.is_paced && !body.empty();
    if (!body.empty() && events_.on_bytes) events_.on_bytes(std::move(body));  // even before an error
    if (!status.ok() || parser_.is_done()) return end(status);
    if (waits) return wait_for_reader();
    read();
  }

  // Suspends the deadlines until read_on(): the reader is slow, not the other server.
  void wait_for_reader() { timer_.expires_at(Clock::time_point::max()); }

  // Ends the call if nothing happens within `seconds` (0: no limit) or before total_deadline_.
  void wait_at_most(double seconds, const char* what) {
    const Clock::time_point quiet_end =
        seconds > 0 ? Clock::now() + to_duration(seconds) : Clock::time_point::max();
    const bool is_total = total_deadline_ <= quiet_end;
    const Clock::time_point end = std::min(total_deadline_, quiet_end);
    timer_.expires_at(end);  // also cancels the previous wait
    if (end == Clock::time_point::max()) return;
    timer_.async_wait(guarded([is_total, what, seconds](Call& call, error_code error) {
      if (error || Clock::now() < call.timer_.expiry()) return;  // a newer wait has begun
      const std::string text = is_total
                                   ? "its response is incomplete after " + seconds_text(call.given_.seconds)
                                   : what + seconds_text(seconds);
      call.end({call.is_connected_ ? StatusCode::kDeadline : StatusCode::kUnavailable, text});
    }));
  }

  void end(const Status& status) {
    close();
    if (const auto on_end = std::exchange(events_, {}).on_end) {
      const bool broke = is_connected_ && status.code() == StatusCode::kUnavailable;
      on_end(broke ? internal_error(status.message()) : status);
    }
  }

  void close() {
    is_over_ = true;
    error_code ignored;
    resolver_.cancel();
    timer_.cancel();
    socket_.close(ignored);
  }

  UpstreamRequest given_;
  UpstreamEvents events_;
  tcp::socket socket_;  // its executor is the call's strand
  tcp::resolver resolver_;
  asio::steady_timer timer_;
  std::vector<tcp::endpoint> endpoints_;
  Clock::time_point total_deadline_;
  std::string message_;
  size_t num_sent_ = 0;
  UpstreamParser parser_;
  std::array<char, 16 << 10> piece_;
  bool is_connected_ = false, has_begun_ = false, is_over_ = false;
};

}  // namespace

std::shared_ptr<UpstreamCall> start_upstream(asio::io_context& io, UpstreamRequest request,
                                             UpstreamEvents events) {
  auto call = std::make_shared<Call>(io, std::move(request), std::move(events));
  call->start();
  return call;
}

}  // namespace fp4moe
