#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <chrono>
#include <exception>
#include <thread>
#include <vector>

#include "server/http/errors.h"
#include "server/http/http.h"
#include "server/http/http_connection.h"
#include "server/http/listen_socket.h"
#include "server/http/origin.h"

namespace fp4moe {
namespace asio = boost::asio;

namespace {

constexpr int kIoThreads = 2;                // they run only short handlers
constexpr double kAcceptRetrySeconds = 0.1;  // after accept() failed, e.g. for lack of descriptors

Status check_limits(const ServerConfig& c) {
  const struct {
    const char* name;
    int64_t value, least, most;
  } limits[] = {{"port", c.port, 0, 65535},
                {"max_connections", c.max_connections, 1, INT32_MAX},
                {"max_body_bytes", c.max_body_bytes, 1, INT32_MAX},
                {"max_header_bytes", c.max_header_bytes, 1, INT32_MAX},
                {"max_output_bytes", c.max_output_bytes, 1, INT64_MAX},
                {"stream_interval", c.stream_interval, 1, INT32_MAX},
                {"max_unsent_bytes", c.max_unsent_bytes, 1, INT64_MAX},
                {"max_buffered_bytes", c.max_buffered_bytes, c.max_body_bytes, INT64_MAX}};
  for (const auto& limit : limits)
    if (limit.value < limit.least || limit.value > limit.most)
      return invalid_argument(std::string(limit.name) + "=" + std::to_string(limit.value) +
                              " is outside the range " + std::to_string(limit.least) + " to " +
                              std::to_string(limit.most));
  const struct {
    const char* name;
    double value, least;
  } times[] = {{"idle_timeout_seconds", c.idle_timeout_seconds, 0.001},
               {"request_timeout_seconds", c.request_timeout_seconds, 0.001},
               {"write_timeout_seconds", c.write_timeout_seconds, 0.001},
               {"keep_alive_seconds", c.keep_alive_seconds, 0}};
  for (const auto& time : times)
    if (!(time.value >= time.least && time.value <= 1e9))
      return invalid_argument(std::string(time.name) + "=" + std::to_string(time.value) +
                              " is outside the range " + std::to_string(time.least) + " to 1e9");
  if (c.http_threads != 0 &&
      (c.http_threads < WorkerPool::kMinThreads || c.http_threads > WorkerPool::kMaxThreads))
    return invalid_argument("http_threads=" + std::to_string(c.http_threads) + " is neither 0 nor between " +
                            std::to_string(WorkerPool::kMinThreads) + " and " +
                            std::to_string(WorkerPool::kMaxThreads));
  return check_hosts(c);
}

class AsioHttpServer final : public HttpServer {
 public:
  AsioHttpServer(const ServerConfig& config, HttpHandler handler, ResponseHook on_response, HttpGate gate,
                 ErrorShaper shape)
      : shared_(config, std::move(handler)),
        acceptor_(asio::make_strand(io_)),
        retry_timer_(acceptor_.get_executor()),
        work_(io_.get_executor()) {
    shared_.on_response = std::move(on_response);
    shared_.gate = std::move(gate);
    shared_.shape = std::move(shape);
  }

  ~AsioHttpServer() override {
    close_all();
    work_.reset();
    for (std::thread& thread : threads_) thread.join();
    if (spare_ >= 0) ::close(spare_);
  }

  Status listen() {
    if (Status status = listening_.open(shared_.config); !status.ok()) return status;
    shared_.is_loopback = listening_.is_loopback();
    spare_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    acceptor_.assign(Acceptor::protocol_type(listening_.family(), 0), listening_.descriptor());
    asio::post(acceptor_.get_executor(), [this] { accept(); });
    for (int i = 0; i < kIoThreads; ++i) threads_.emplace_back([this] { serve(); });
    return {};
  }

  int port() const override { return listening_.port(); }
  int64_t open_connections() const override { return shared_.open.load(); }
  int64_t busy_exchanges() const override { return shared_.busy.load(); }
  int64_t buffered_bytes() const override { return shared_.memory.total(); }

  void close_all() override {
    asio::post(acceptor_.get_executor(), [this] {
      boost::system::error_code ignored;
      acceptor_.close(ignored);
      retry_timer_.cancel();
      for (const auto& weak : connections_) {
        if (const auto connection = weak.lock()) connection->shut_down();
      }
    });
    shared_.stopping.store(true);
    shared_.workers.stop();
  }

 private:
  using Acceptor = asio::basic_socket_acceptor<asio::generic::stream_protocol>;

  // An exception from a task (out of memory) ends neither the thread nor the process.
  void serve() {
    for (bool is_over = false; !is_over;) {
      try {
        io_.run();
        is_over = true;
      } catch (const std::exception& error) {
        shared_.log(LogLevel::kError, std::string("an HTTP connection failed: ") + error.what());
      }
    }
  }

  // Everything below runs on the acceptor's strand.
  void accept() {
    if (!acceptor_.is_open()) return;
    acceptor_.async_accept(asio::make_strand(io_),
                           [this](boost::system::error_code error, Connection::Socket socket) {
                             if (!acceptor_.is_open()) return;
                             if (error && !refuse_next(error)) return retry(error);
                             if (!error) accept_failed_ = false;
                             if (!error) add(std::move(socket));
                             accept();
                           });
  }

  // Out of file descriptors: frees the spare one to refuse one waiting client with 503. False: no client was
  // waiting, or the error is a different one.
  bool refuse_next(boost::system::error_code error) {
    if (error != asio::error::no_descriptors || spare_ < 0) return false;
    ::close(spare_);
    const int client = ::accept4(acceptor_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    spare_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (client < 0) return false;
    if (spare_ >= 0) {  // another descriptor became free
      add(Connection::Socket(asio::make_strand(io_), Acceptor::protocol_type(listening_.family(), 0),
                             client));
      return true;
    }
    say_once("connections are refused with 503: " + error.message());
    refuse(client, "the server has no file descriptors left");
    ::close(client);
    spare_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    return true;
  }

  void retry(boost::system::error_code error) {
    if (error != asio::error::no_descriptors || spare_ < 0)
      say_once("cannot accept connections: " + error.message() + "; retrying");
    retry_timer_.expires_after(std::chrono::milliseconds(static_cast<int>(1000 * kAcceptRetrySeconds)));
    retry_timer_.async_wait([this](boost::system::error_code) { accept(); });
  }

  void say_once(const std::string& line) {
    if (!accept_failed_) shared_.log(LogLevel::kWarning, line);
    accept_failed_ = true;
  }

  static void refuse(int client, const std::string& why) {
    const HttpResponse response = error_response(unavailable(why));
    const std::string bytes =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n" +
        response.extra_headers + "Content-Length: " + std::to_string(response.body.size()) + "\r\n\r\n" +
        response.body;
    ::send(client, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  void add(Connection::Socket socket) {
    if (shared_.open.load() >= shared_.config.max_connections)
      return refuse(socket.native_handle(), "the server already has max_connections=" +
                                                std::to_string(shared_.config.max_connections) + " clients");
    if (connections_.size() >= 2 * static_cast<size_t>(std::max<int64_t>(shared_.open.load(), 16))) {
      connections_.erase(std::remove_if(connections_.begin(), connections_.end(),
                                        [](const auto& weak) { return weak.expired(); }),
                         connections_.end());
    }
    auto connection = std::make_shared<Connection>(std::move(socket), shared_);
    connections_.push_back(connection);
    connection->start();
  }

  ListenSocket listening_;
  ConnectionShared shared_;  // outlives io_, whose destructor frees the last connections
  asio::io_context io_{kIoThreads};
  Acceptor acceptor_;
  asio::steady_timer retry_timer_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::vector<std::weak_ptr<Connection>> connections_;
  bool accept_failed_ = false;  // so that consecutive failures log one line
  std::vector<std::thread> threads_;
  int spare_ = -1;  // reserve descriptor for refuse_next()
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::make(const ServerConfig& config, HttpHandler handler,
                                                     ResponseHook on_response, HttpGate gate,
                                                     ErrorShaper shape) {
  if (Status status = check_limits(config); !status.ok()) return status;
  auto server = std::make_unique<AsioHttpServer>(config, std::move(handler), std::move(on_response),
                                                 std::move(gate), std::move(shape));
  if (Status status = server->listen(); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(std::move(server));
}

std::chrono::steady_clock::time_point deadline_in(double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr double kLongest = 1e8;  // keeps the conversion to clock ticks in range
  const std::chrono::duration<double> time(seconds > 0 ? std::min(seconds, kLongest) : 0);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
}

void HttpServer::wait_for_responses(std::chrono::steady_clock::time_point deadline) const {
  while (busy_exchanges() > 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

}  // namespace fp4moe
