// One client's socket. Everything runs on the connection's strand except post().
#pragma once

#include <atomic>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/http.h"

namespace fp4moe {

// What all connections of a server share.
struct ConnectionShared {
  ServerConfig config;
  HttpHandler handler;
  AnswerHook on_answer;
  std::atomic<int64_t> open{0};  // connections
  std::atomic<int64_t> busy{0};  // of them, those with an answer not yet wholly sent
  void log(LogLevel level, const std::string& line) const {
    if (config.log_sink) config.log_sink(level, line);
  }
};

// One read is always outstanding, also while an answer is made, so that a disconnect is seen at once; what is
// read meanwhile (pipelined requests) waits in `in_` until the answer is sent, and beyond a bound is not
// read: a client that takes no answers gets no further ones made.
class Connection final : public HttpExchange, public std::enable_shared_from_this<Connection> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;  // TCP or Unix

  Connection(Socket socket, ConnectionShared& shared);
  ~Connection() override;
  void start();      // from any thread
  void shut_down();  // from any thread: closes now

  void post(std::function<void()> task) override;
  const HttpRequest& request() const override { return request_; }
  void respond(HttpResponse response) override;
  void start_stream(const std::string& content_type) override;
  void write(std::string bytes) override;
  void finish() override;
  void drop(const std::string& reason) override;
  void on_quiet(double seconds, std::function<void()> task) override;
  void on_disconnect(std::function<void()> task) override { on_disconnect_ = std::move(task); }

 private:
  using Clock = std::chrono::steady_clock;

  void read();
  void on_readable(boost::system::error_code error);
  void parse();
  void refuse(boost::system::error_code error);
  void dispatch();
  void send(std::string bytes);
  void flush();
  void on_written(boost::system::error_code error);
  void proceed();
  bool is_answering() const { return busy_ || unsent_bytes_ > 0; }
  void count_busy();
  void tell_answer(int status);
  void tick();
  void look_in(double seconds);
  double looks_apart() const;
  void linger();
  void close();
  std::string header(int status, const std::string& content_type) const;

  Socket socket_;
  ConnectionShared& shared_;
  boost::asio::steady_timer timer_;
  Clock::time_point read_deadline_, write_deadline_;

  boost::beast::flat_buffer in_;
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  HttpRequest request_;
  std::function<void()> on_disconnect_;
  std::function<void()> on_quiet_;
  double quiet_seconds_ = 0;
  Clock::time_point quiet_since_;

  std::deque<std::string> out_;       // not yet given to the socket
  std::vector<std::string> writing_;  // given to the socket
  size_t unsent_bytes_ = 0;           // of out_ and writing_

  bool reading_ = false;
  bool busy_ = false;          // between dispatch and the answer's end
  bool counted_busy_ = false;  // in ConnectionShared::busy, as is_answering() said last
  bool streaming_ = false;
  bool chunked_ = false;  // HTTP/1.1 streams; HTTP/1.0 ends them by closing
  bool http11_ = true;
  bool keep_alive_ = true;
  bool close_when_sent_ = false;
  bool lingering_ = false;  // our side is shut; input is discarded until the client closes
  bool closed_ = false;
};

}  // namespace fp4moe
