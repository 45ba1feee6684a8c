#include "fp4moe/router.h"

#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <exception>
#include <string_view>
#include <thread>
#include <vector>

#include "server/guarded_sinks.h"
#include "server/http/cors.h"
#include "server/http/errors.h"
#include "server/http/excerpt.h"
#include "server/http/route_path.h"
#include "server/json.h"
#include "server/router/node_response.h"
#include "server/router/node_table.h"
#include "server/router/relay.h"
#include "server/router/upstream.h"

namespace fp4moe {
namespace {

constexpr uint64_t kMaxLookBytes = 1 << 20;  // limit for responses to the router's own health checks

// The handler of a route.
enum class Target { kRouter, kDecodeNode, kGeneration, kStoredResponse };

// All routes of a router; admin routes exist only on the nodes. is_route() compares a request's path with
// these.
constexpr struct Route {
  const char *method, *path;
  Target target;
  ErrorShape errors = ErrorShape::kOpenAi;
} kRoutes[] = {
    {"GET", "/health", Target::kRouter},
    {"GET", "/ping", Target::kRouter},
    {"GET", "/metrics", Target::kRouter},
    {"GET", "/workers", Target::kRouter},
    {"POST", "/v1/chat/completions", Target::kGeneration},
    {"POST", "/v1/completions", Target::kGeneration},
    {"POST", "/v1/responses", Target::kGeneration},
    {"GET", "/v1/responses/", Target::kStoredResponse},
    {"DELETE", "/v1/responses/", Target::kStoredResponse},
    {"POST", "/v1/responses/", Target::kStoredResponse},
    {"POST", "/v1/messages", Target::kGeneration, ErrorShape::kAnthropic},
    {"POST", "/v1/messages/count_tokens", Target::kDecodeNode, ErrorShape::kAnthropic},
    {"POST", "/generate", Target::kGeneration},
    {"POST", "/tokenize", Target::kDecodeNode},
    {"POST", "/detokenize", Target::kDecodeNode},
    {"POST", "/apply-template", Target::kDecodeNode},
    {"GET", "/v1/models", Target::kDecodeNode},
    {"GET", "/v1/models/", Target::kDecodeNode},
    {"GET", "/model_info", Target::kDecodeNode},
    {"GET", "/get_model_info", Target::kDecodeNode},
    {"GET", "/version", Target::kDecodeNode},
    {"GET", "/props", Target::kDecodeNode},
    {"GET", "/server_info", Target::kDecodeNode},
    {"GET", "/get_server_info", Target::kDecodeNode},
    {"GET", "/health_generate", Target::kDecodeNode},
    {"GET", "/openapi.json", Target::kDecodeNode},
    {"GET", "/expert_load", Target::kDecodeNode},
    {"GET", "/expert_load.svg", Target::kDecodeNode},
    {"GET", "/", Target::kDecodeNode},
    {"GET", "/chat", Target::kDecodeNode},
};

bool has_path(const Route& route, const std::string& path) {
  return is_route(route.path, path) && path.find("..") == std::string::npos;
}

bool has_method(const Route& route, const std::string& method) {
  return method == route.method || (method == "HEAD" && route.method == std::string_view("GET"));
}

ErrorShape errors_of(const std::string& path) {
  for (const Route& route : kRoutes)
    if (has_path(route, path)) return route.errors;
  return ErrorShape::kOpenAi;
}

Status check_limits(const RouterConfig& c) {
  constexpr double kSeconds = 1e9, kBytes = 1e15;  // clocks count nanoseconds in 64 bits
  const struct {
    const char* name;
    double value, least, most;
  } limits[] = {{"health_check_seconds", c.health_check_seconds, 0.001, kSeconds},
                {"health_timeout_seconds", c.health_timeout_seconds, 0.001, kSeconds},
                {"request_timeout_seconds", c.request_timeout_seconds, 0, kSeconds},
                {"quiet_timeout_seconds", c.quiet_timeout_seconds, 0, kSeconds},
                {"max_response_bytes", static_cast<double>(c.max_response_bytes), 1, kBytes},
                {"max_held_bytes", static_cast<double>(c.max_held_bytes), 1, kBytes}};
  for (const auto& limit : limits)
    if (!(limit.value >= limit.least && limit.value <= limit.most))
      return invalid_argument(std::string(limit.name) + "=" + std::to_string(limit.value) +
                              " is outside the range " + std::to_string(limit.least) + " to " +
                              std::to_string(limit.most));
  return {};
}

class RouterImpl final : public Router {
 public:
  explicit RouterImpl(RouterConfig config)
      : config_(std::move(config)),
        relays_{io_,
                nodes_,
                config_,
                [this](LogLevel level, const std::string& line) { log(level, line); },
                [this](size_t node) { look_now(node); },
                num_live_,
                held_bytes_} {}
  ~RouterImpl() override { stop(); }

  Status listen() {
    if (Status status = check_origins(config_.http); !status.ok()) return status;
    if (Status status = check_limits(config_); !status.ok()) return status;
    if (Status status = nodes_.add(config_); !status.ok()) return status;
    auto http = HttpServer::make(
        config_.http, [this](const std::shared_ptr<HttpExchange>& e) { route(e); }, {}, {},
        [](const HttpRequest& head, HttpResponse error) {
          return shaped(errors_of(head.path), std::move(error));
        });
    if (!http.ok()) return http.status();
    http_ = std::move(http).value();
    for (size_t node = 0; node < nodes_.size(); ++node) timers_.emplace_back(io_);
    for (size_t node = 0; node < nodes_.size(); ++node) look_at(node);
    thread_ = std::thread([this] { run(); });
    return {};
  }

  int port() const override { return http_->port(); }
  bool is_ready() const override { return nodes_.has("prefill") && nodes_.has("decode"); }

  void drain(double timeout_seconds) override {
    draining_.store(true);
    http_->wait_for_responses(deadline_in(timeout_seconds));
  }

  void stop() override {
    if (http_ == nullptr || stopped_.exchange(true)) return;
    draining_.store(true);
    http_->close_all();
    while (num_live_.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void route(const std::shared_ptr<HttpExchange>& exchange) {
    const HttpRequest& request = exchange->request();
    if (auto preflight = respond_to_preflight(config_.http, request)) return exchange->respond(*preflight);
    const Route* found = nullptr;
    const ErrorShape errors = errors_of(request.path);
    std::string allowed;
    for (const Route& r : kRoutes) {
      if (!has_path(r, request.path)) continue;
      allowed += (allowed.empty() ? "" : ", ") + std::string(r.method);
      if (has_method(r, request.method)) found = &r;
    }
    if (allowed.empty())
      return exchange->respond(error_response(
          not_found("no route " + excerpt(request.path) + " on a router; send the request to a node")));
    if (found == nullptr) {
      HttpResponse response = error_response(
          invalid_argument("the method must be " + allowed + ", got " + excerpt(request.method)));
      response.status = 405;
      response.extra_headers = "Allow: " + allowed + "\r\n";
      return exchange->respond(shaped(errors, std::move(response)));
    }
    if (found->target == Target::kRouter) return exchange->respond(own_response(found->path));
    if (found->target == Target::kStoredResponse)
      return exchange->respond(error_response(not_found(kNoStoredResponses), "response_id"));
    if (draining_.load())
      return exchange->respond(shaped(errors, error_response(unavailable("the router is shutting down"))));
    if (found->target == Target::kGeneration) return relay_generation(relays_, exchange, errors);
    relay_plain(relays_, exchange, errors);
  }

  HttpResponse own_response(const std::string& path) const {
    if (path == "/health") return health();
    if (path == "/ping") return without_body(health());
    if (path == "/workers") return {.body = to_text({{"workers", nodes_.list()}})};
    return {.body = nodes_.print_metrics(), .content_type = "text/plain; version=0.0.4; charset=utf-8"};
  }

  HttpResponse health() const {
    if (draining_.load()) return error_response(unavailable("the router is shutting down"));
    for (const char* role : {"prefill", "decode"})
      if (!nodes_.has(role)) return error_response(unavailable(nodes_.problems(role)));
    return {.body = to_text({{"status", "ok"}})};
  }

  // ---- health checks, on io_'s thread ---------------------------------------------------------------

  void run() {
    for (;;) {
      try {
        io_.run();
        return;
      } catch (const std::exception& error) {  // out of memory or a bug here: one handler is lost
        log(LogLevel::kError, std::string("router: ") + error.what());
      }
    }
  }

  // Checks /health, and for a node that was down also /server_info.
  void look_at(size_t index) {
    ask(index, "/health", [this, index](const Status& status, const std::string&) {
      if (!status.ok()) return settle(index, status);
      if (nodes_.node(index).is_up) return settle(index, {});
      ask(index, "/server_info", [this, index](const Status& known, const std::string& body) {
        settle(index, known.ok() ? learn(index, body) : known);
      });
    });
  }

  // Begins a node's next health check at once, unless one is running.
  void look_now(size_t index) {
    boost::asio::post(io_, [this, index] { timers_[index].cancel(); });
  }

  // Ends a node's health check and schedules the next one.
  void settle(size_t index, const Status& status) {
    const RouterNode node = nodes_.node(index);
    const std::string name = node.role + " node " + node.name;
    if (status.ok() ? nodes_.set_up(index) : nodes_.set_down(index, status.message()))
      log(status.ok() ? LogLevel::kInfo : LogLevel::kWarning,
          name + (status.ok() ? " is up" : " is down: " + status.message()));
    timers_[index].expires_after(
        std::chrono::milliseconds(static_cast<int64_t>(1000 * config_.health_check_seconds)));
    timers_[index].async_wait([this, index](boost::system::error_code) { look_at(index); });
  }

  // Adopts the node's /server_info if its role matches the configuration.
  Status learn(size_t index, const std::string& body) {
    const RouterNode node = nodes_.node(index);
    const Result<NodeInfo> info = read_node_info(body);
    if (!info.ok()) return info.status();
    if (Status status = check_node_info(*info, node.role, node.knows_port); !status.ok()) return status;
    nodes_.set_bootstrap_port(index, info->bootstrap_port);
    return {};
  }

  // Calls `then` with the body of a 200 response, or with an error.
  void ask(size_t index, const std::string& path,
           std::function<void(const Status&, const std::string&)> then) {
    struct Response {
      int status = 0;
      std::string body;
    };
    const auto response = std::make_shared<Response>();
    UpstreamEvents events;
    events.on_head = [response](const UpstreamHead& head) { response->status = head.status; };
    events.on_bytes = [response](const std::string& bytes) { response->body += bytes; };
    events.on_end = [response, path, then = std::move(then)](const Status& status) {
      if (!status.ok()) return then({status.code(), path + ": " + status.message()}, "");
      if (response->status == 200) return then({}, response->body);
      then(unavailable(path + " returned status " + std::to_string(response->status)), "");
    };
    UpstreamRequest request{.url = nodes_.node(index).url,
                            .method = "GET",
                            .target = path,
                            .seconds = config_.health_timeout_seconds,
                            .max_body_bytes = kMaxLookBytes};
    if (!config_.api_key.empty()) request.authorization = "Bearer " + config_.api_key;
    start_upstream(io_, std::move(request), std::move(events));
  }

  void log(LogLevel level, const std::string& line) const {
    if (config_.http.log_sink) config_.http.log_sink(level, line);
  }

  const RouterConfig config_;
  NodeTable nodes_;
  std::atomic<bool> draining_{false}, stopped_{false};
  std::atomic<int64_t> num_live_{0}, held_bytes_{0};
  boost::asio::io_context io_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{io_.get_executor()};
  std::vector<boost::asio::steady_timer> timers_;  // for each node's next health check
  const RelayContext relays_;
  std::thread thread_;
  std::unique_ptr<HttpServer> http_;  // last: its threads use the members above
};

}  // namespace

Result<std::unique_ptr<Router>> Router::make(RouterConfig config) {
  guard_sinks(config.http);
  auto router = std::make_unique<RouterImpl>(std::move(config));
  if (Status status = router->listen(); !status.ok()) return status;
  return std::unique_ptr<Router>(std::move(router));
}

}  // namespace fp4moe
