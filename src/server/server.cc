#include <algorithm>
#include <atomic>
#include <chrono>

#include "fp4moe/server.h"
#include "server/api/routes.h"
#include "server/guarded_sinks.h"
#include "server/http/auth.h"
#include "server/http/cors.h"
#include "server/http/http.h"

namespace fp4moe {

namespace {

constexpr auto kLastWords = std::chrono::seconds(1);  // for sending the ends of responses cut off by drain()

class ServerImpl final : public Server {
 public:
  explicit ServerImpl(ServerConfig config) : config_(std::move(config)) {}
  ~ServerImpl() override { stop(); }

  Status listen() {
    auto http = HttpServer::make(
        config_, [this](const std::shared_ptr<HttpExchange>& e) { routes_.handle(e); },
        [this](const HttpRequest& request, int status) { routes_.count_response(request, status); },
        [this](const HttpRequest& head) { return routes_.respond_to_head(head); }, ServerRoutes::shape_error);
    if (!http.ok()) return http.status();
    http_ = std::move(http).value();
    return {};
  }

  int port() const override { return http_->port(); }
  void set_engine(Engine& engine) override { routes_.set_engine(engine); }

  void drain(double timeout_seconds) override {
    using Clock = std::chrono::steady_clock;
    const auto end = deadline_in(timeout_seconds);
    routes_.start_draining();
    if (Engine* engine = routes_.engine()) engine->drain(timeout_seconds);
    http_->wait_for_responses(std::max(end, Clock::now() + kLastWords));
  }

  void stop() override {
    if (http_ == nullptr || stopped_.exchange(true)) return;
    routes_.start_draining();
    http_->close_all();
    routes_.wait_for_live_requests();
  }

 private:
  const ServerConfig config_;
  std::atomic<bool> stopped_{false};
  ServerRoutes routes_{config_, [this] {
                         return HttpGauges{http_->open_connections(), http_->buffered_bytes()};
                       }};
  std::unique_ptr<HttpServer> http_;  // last: its threads use the members above
};

}  // namespace

Result<std::unique_ptr<Server>> Server::make(ServerConfig config) {
  if (Status status = check_keys(config); !status.ok()) return status;
  if (Status status = check_origins(config); !status.ok()) return status;
  guard_sinks(config);
  auto server = std::make_unique<ServerImpl>(std::move(config));
  if (Status status = server->listen(); !status.ok()) return status;
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace fp4moe
