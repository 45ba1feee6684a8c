#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <thread>
#include <vector>

#include "server/http.h"
#include "server/http_connection.h"

namespace fp4moe {
namespace asio = boost::asio;
using asio::ip::tcp;

namespace {

constexpr int kThreads = 2;
constexpr double kAcceptRetrySeconds = 0.1;  // after accept failed, such as for want of file descriptors

Status check_limits(const ServerConfig& c) {
  const struct {
    const char* name;
    int64_t value, least, most;
  } limits[] = {{"port", c.port, 0, 65535},
                {"max_connections", c.max_connections, 1, INT32_MAX},
                {"max_body_bytes", c.max_body_bytes, 1, INT32_MAX},
                {"max_header_bytes", c.max_header_bytes, 1, INT32_MAX},
                {"max_unsent_bytes", c.max_unsent_bytes, 1, INT64_MAX}};
  for (const auto& limit : limits)
    if (limit.value < limit.least || limit.value > limit.most)
      return invalid_argument(std::string(limit.name) + "=" + std::to_string(limit.value) + " is not in " +
                              std::to_string(limit.least) + ".." + std::to_string(limit.most));
  return {};
}

class AsioHttpServer final : public HttpServer {
 public:
  AsioHttpServer(const ServerConfig& config, HttpHandler handler, AnswerHook on_answer)
      : acceptor_(asio::make_strand(io_)), retry_timer_(acceptor_.get_executor()), work_(io_.get_executor()) {
    shared_.config = config;
    shared_.handler = std::move(handler);
    shared_.on_answer = std::move(on_answer);
  }

  ~AsioHttpServer() override {
    close_all();
    work_.reset();
    for (std::thread& thread : threads_) thread.join();
  }

  Status listen() {
    const ServerConfig& config = shared_.config;
    const std::string place = config.host + ":" + std::to_string(config.port);
    if (Status status = check_limits(config); !status.ok()) return status;
    boost::system::error_code error;
    tcp::resolver resolver(io_);
    const auto found =
        resolver.resolve(config.host, std::to_string(config.port), tcp::resolver::passive, error);
    if (error || found.empty())
      return invalid_argument("host=" + config.host + " has no address: " + error.message());
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error) return unavailable("cannot listen on " + place + ": " + error.message());
    port_ = acceptor_.local_endpoint().port();
    asio::post(acceptor_.get_executor(), [this] { accept(); });
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { io_.run(); });
    return {};
  }

  int port() const override { return port_; }
  int64_t open_connections() const override { return shared_.open.load(); }
  int64_t busy_exchanges() const override { return shared_.busy.load(); }

  void close_all() override {
    asio::post(acceptor_.get_executor(), [this] {
      boost::system::error_code ignored;
      acceptor_.close(ignored);
      retry_timer_.cancel();
      for (const auto& weak : connections_) {
        if (const auto connection = weak.lock()) connection->shut_down();
      }
    });
  }

 private:
  // Everything below runs on the acceptor's strand.
  void accept() {
    if (!acceptor_.is_open()) return;
    acceptor_.async_accept(asio::make_strand(io_),
                           [this](boost::system::error_code error, tcp::socket socket) {
                             if (!acceptor_.is_open()) return;
                             if (error) return retry(error);
                             accept_failed_ = false;
                             add(std::move(socket));
                             accept();
                           });
  }

  void retry(boost::system::error_code error) {
    const ServerConfig& config = shared_.config;
    if (!accept_failed_ && config.log_sink)
      config.log_sink(LogLevel::kWarning, "cannot accept connections: " + error.message() + "; trying on");
    accept_failed_ = true;
    retry_timer_.expires_after(std::chrono::milliseconds(static_cast<int>(1000 * kAcceptRetrySeconds)));
    retry_timer_.async_wait([this](boost::system::error_code) { accept(); });
  }

  void add(tcp::socket socket) {
    if (shared_.open.load() >= shared_.config.max_connections) {
      static constexpr char kFull[] =
          "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: "
          "0\r\n\r\n";
      boost::system::error_code ignored;
      socket.non_blocking(true, ignored);
      socket.write_some(asio::buffer(kFull, sizeof kFull - 1), ignored);
      return;
    }
    if (connections_.size() >= 2 * static_cast<size_t>(std::max<int64_t>(shared_.open.load(), 16))) {
      connections_.erase(std::remove_if(connections_.begin(), connections_.end(),
                                        [](const auto& weak) { return weak.expired(); }),
                         connections_.end());
    }
    auto connection = std::make_shared<Connection>(std::move(socket), shared_);
    connections_.push_back(connection);
    connection->start();
  }

  ConnectionShared shared_;  // outlives io_, whose destructor frees the last connections
  asio::io_context io_{kThreads};
  tcp::acceptor acceptor_;
  asio::steady_timer retry_timer_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::vector<std::weak_ptr<Connection>> connections_;
  bool accept_failed_ = false;  // the last time: one line for a row of failures
  std::vector<std::thread> threads_;
  int port_ = 0;
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::make(const ServerConfig& config, HttpHandler handler,
                                                     AnswerHook on_answer) {
  auto server = std::make_unique<AsioHttpServer>(config, std::move(handler), std::move(on_answer));
  if (Status status = server->listen(); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace fp4moe
