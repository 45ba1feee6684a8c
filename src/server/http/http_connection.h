// One client's socket. Runs on the connection's strand, except handlers and tasks that run on a worker.
#pragma once

#include <atomic>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/http/http.h"
#include "server/http/read_pace.h"
#include "server/http/request_body.h"
#include "server/http/request_memory.h"
#include "server/http/worker_pool.h"

namespace fp4moe {

// State shared by all connections of a server.
struct ConnectionShared {
  ConnectionShared(const ServerConfig& server_config, HttpHandler http_handler)
      : config(server_config),
        handler(std::move(http_handler)),
        memory(config.max_buffered_bytes),
        workers(config.http_threads > 0 ? config.http_threads : WorkerPool::default_threads()) {}

  const ServerConfig config;
  const HttpHandler handler;
  HttpGate gate;
  ErrorShaper shape;
  ResponseHook on_response;
  bool is_loopback = false;      // whether the listener's address is a loopback address
  std::atomic<int64_t> open{0};  // connections
  std::atomic<int64_t> busy{0};  // connections with a response not yet completely sent
  std::atomic<bool> stopping{false};
  RequestMemory memory;
  ReadPace pace{64 << 20, 8 << 20};
  // Large bodies queued for a worker. If they exceed a quarter of the memory budget, further large requests
  // are refused, so that the queue cannot lock out small ones.
  std::atomic<int64_t> queued_bytes{0};
  WorkerPool workers;
  void log(LogLevel level, const std::string& line) const {
    if (config.log_sink) config.log_sink(level, line);
  }
};

// A read is pending even while a response is produced, so that a disconnect is noticed at once. Pipelined
// requests read meanwhile wait in `in_`, up to a bound, until the response is sent; a client that does not
// read a response gets no further responses.
//
// A handler or task on a worker has exclusive use of the connection: the connection is lent, and everything
// that happens on the strand meanwhile (bytes, timers, posted tasks) waits in `deferred_` until the worker
// returns it.
//
// Large because head, body, response and deadlines are one state machine on one strand.
class Connection final : public HttpExchange,
                         public RequestMemory::Holder,
                         public std::enable_shared_from_this<Connection> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;  // TCP or Unix

  Connection(Socket socket, ConnectionShared& shared);
  ~Connection() override;
  void start();      // from any thread
  void shut_down();  // from any thread: closes now

  void post(std::function<void()> task) override;
  void run_long(std::function<void()> task) override { lend(std::move(task), /*is_small=*/false); }
  bool hold(int64_t bytes) override;
  const HttpRequest& request() const override { return request_; }
  std::string peer() const override;
  void set_headers(std::string lines) override { more_headers_ = std::move(lines); }
  void respond(HttpResponse response) override;
  void start_stream(const std::string& content_type) override;
  void write(std::string bytes) override;
  void finish() override;
  int64_t unsent_bytes() const override { return static_cast<int64_t>(unsent_bytes_); }
  void on_sent(std::function<void()> task) override { on_sent_ = std::move(task); }
  void drop(const std::string& reason) override;
  void on_quiet(double seconds, std::function<void()> task) override;
  void on_disconnect(std::function<void()> task) override { on_disconnect_ = std::move(task); }

  void give_way() override;

 private:
  using Clock = std::chrono::steady_clock;
  static Clock::time_point seconds_from_now(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  using Parser = boost::beast::http::request_parser<RequestBody>;

  // Reading requests: http_connection_read.cc.
  void read();
  bool waits_for_pace();
  void on_readable(boost::system::error_code error);
  void parse();
  bool skip_empty_lines();
  bool parse_some();
  bool take_head();
  bool make_room_for_body();
  HttpResponse shaped(HttpResponse error) const;
  void respond_to_head(HttpResponse response);
  void respond_and_close(HttpResponse response);
  void refuse(int status, const std::string& problem);
  void refuse_parse(boost::system::error_code error);
  void refuse_for_memory();
  void begin_response();
  void dispatch();
  void handle();
  void forget_body();
  bool account(size_t body_capacity);

  void run(std::function<void()> task);
  void lend(std::function<void()> task, bool is_small);
  void work(const std::function<void()>& task);
  void take_back();
  bool is_abandoned();

  void send(std::string bytes);
  void flush();
  void on_written(boost::system::error_code error);
  void proceed();
  bool is_responding() const { return busy_ || unsent_bytes_ > 0; }
  void count_busy();
  void report_response(int status);
  void tick();
  void look_in(double seconds);
  double looks_apart() const;
  void linger();
  void close();
  std::string header(int status, const std::string& content_type) const;

  Socket socket_;
  ConnectionShared& shared_;
  boost::asio::steady_timer timer_, pace_timer_;
  Clock::time_point read_deadline_, write_deadline_;
  Clock::time_point next_read_;  // earliest time of the next read while a large body arrives

  boost::beast::flat_buffer in_;
  std::optional<Parser> parser_;
  size_t head_bytes_ = 0, head_lines_ = 0;  // of the request being read
  std::optional<uint64_t> content_length_;
  HttpRequest request_;
  std::string more_headers_;   // of the response
  int64_t queued_bytes_ = 0;   // this connection's part of ConnectionShared::queued_bytes
  int64_t held_bytes_ = 0;     // charged by hold()
  bool is_accounted_ = false;  // has a share in ConnectionShared::memory
  std::function<void()> on_disconnect_;
  std::function<void()> on_sent_;
  std::function<void()> on_quiet_;
  double quiet_seconds_ = 0;
  Clock::time_point quiet_since_;

  std::deque<std::string> out_;       // not yet given to the socket
  std::vector<std::string> writing_;  // given to the socket
  size_t unsent_bytes_ = 0;           // of out_ and writing_

  bool lent_ = false;  // only the strand reads and writes these two
  std::deque<std::function<void()>> deferred_;
  bool reading_ = false;
  bool busy_ = false;          // from dispatch or refusal to the end of the response
  bool counted_busy_ = false;  // counted in ConnectionShared::busy
  bool streaming_ = false;
  bool chunked_ = false;  // HTTP/1.1 streams are chunked; HTTP/1.0 streams end by closing
  bool http11_ = true;
  bool keep_alive_ = true;
  bool close_when_sent_ = false;
  bool lingering_ = false;  // the send side is shut down; input is discarded until the client closes
  bool closed_ = false;
};

}  // namespace fp4moe
