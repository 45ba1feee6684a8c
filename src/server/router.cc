#include "fp4moe/router.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <thread>

#include "server/cors.h"
#include "server/errors.h"
#include "server/json.h"
#include "server/node_table.h"
#include "server/relay.h"
#include "server/upstream.h"

namespace fp4moe {
namespace {

constexpr double kHealthSeconds = 5;  // that a node may take to say how it is

bool is_generation(const HttpRequest& request) {
  return request.method == "POST" && (request.path == "/v1/chat/completions" ||
                                      request.path == "/v1/completions" || request.path == "/generate");
}

// What any decode node can answer: questions, and texts to be cut into tokens.
bool is_for_any_node(const HttpRequest& request) {
  return request.method == "GET" || request.method == "HEAD" || request.path == "/tokenize" ||
         request.path == "/detokenize";
}

class RouterImpl final : public Router {
 public:
  explicit RouterImpl(RouterConfig config)
      : config_(std::move(config)),
        relays_{io_, nodes_, [this](LogLevel level, const std::string& line) { log(level, line); },
                num_live_} {}
  ~RouterImpl() override { stop(); }

  Status listen() {
    if (Status status = check_origins(config_.http); !status.ok()) return status;
    if (Status status = nodes_.add(config_); !status.ok()) return status;
    auto http = HttpServer::make(config_.http, [this](const std::shared_ptr<HttpExchange>& e) { route(e); });
    if (!http.ok()) return http.status();
    http_ = std::move(http).value();
    for (size_t node = 0; node < nodes_.size(); ++node) look_at(node);
    thread_ = std::thread([this] { io_.run(); });
    return {};
  }

  int port() const override { return http_->port(); }
  bool is_ready() const override { return nodes_.has("prefill") && nodes_.has("decode"); }

  void drain(double timeout_seconds) override {
    draining_.store(true);
    http_->wait_for_answers(std::chrono::steady_clock::now() +
                            std::chrono::milliseconds(static_cast<int64_t>(1000 * timeout_seconds)));
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
    if (auto preflight = answer_preflight(config_.http, request)) return exchange->respond(*preflight);
    const bool is_question = request.method == "GET" || request.method == "HEAD";
    if (is_question && request.path == "/health") return exchange->respond(health());
    if (is_question && request.path == "/workers")
      return exchange->respond({.body = to_text({{"workers", nodes_.list()}})});
    if (is_question && request.path == "/metrics")
      return exchange->respond(
          {.body = nodes_.print_metrics(), .content_type = "text/plain; version=0.0.4; charset=utf-8"});
    if (draining_.load())
      return exchange->respond(error_response(unavailable("the router is shutting down")));
    if (is_generation(request)) return relay_generation(relays_, exchange);
    if (is_for_any_node(request)) return relay_plain(relays_, exchange);
    exchange->respond(error_response(
        not_found("no route " + request.method + " " + request.path + " on a router; ask a node")));
  }

  HttpResponse health() const {
    if (draining_.load()) return error_response(unavailable("the router is shutting down"));
    for (const char* role : {"prefill", "decode"})
      if (!nodes_.has(role)) return error_response(unavailable(nodes_.problems(role)));
    return {.body = to_text({{"status", "ok"}})};
  }

  // ---- the nodes, on io_'s thread -------------------------------------------------------------------

  // Asks /health; of a node that was not up, then what it is.
  void look_at(size_t index) {
    ask(index, "/health", [this, index](const Status& answered, const std::string&) {
      if (!answered.ok()) return settle(index, answered);
      if (nodes_.node(index).is_up) return settle(index, {});
      ask(index, "/server_info", [this, index](const Status& known, const std::string& body) {
        settle(index, known.ok() ? learn(index, body) : known);
      });
    });
  }

  void settle(size_t index, const Status& status) {
    const RouterNode node = nodes_.node(index);
    const std::string name = node.role + " node " + node.name;
    if (status.ok() ? nodes_.set_up(index) : nodes_.set_down(index, status.message()))
      log(status.ok() ? LogLevel::kInfo : LogLevel::kWarning,
          name + (status.ok() ? " is up" : " is down: " + status.message()));
    const auto timer = std::make_shared<boost::asio::steady_timer>(io_);
    timer->expires_after(
        std::chrono::milliseconds(static_cast<int64_t>(1000 * config_.health_check_seconds)));
    timer->async_wait([this, index, timer](boost::system::error_code) { look_at(index); });
  }

  // Takes over what a node says of itself, if it is what it was said to be.
  Status learn(size_t index, const std::string& body) {
    const Result<json> info = parse_json(body);
    if (!info.ok()) return info.status();
    const std::string role = nodes_.node(index).role;
    const std::string mode = info->is_object() ? info->value("disaggregation_mode", "none") : "none";
    if (mode != role)
      return unsupported("it runs with --disaggregation-mode " + mode + ", and is given as --" + role);
    if (role == "prefill") nodes_.set_bootstrap_port(index, info->value("disaggregation_bootstrap_port", 0));
    return {};
  }

  // Calls `then` with the body of a 200 answer, or what was wrong.
  void ask(size_t index, const std::string& path,
           std::function<void(const Status&, const std::string&)> then) {
    struct Answer {
      int status = 0;
      std::string body;
    };
    const auto answer = std::make_shared<Answer>();
    UpstreamEvents events;
    events.on_head = [answer](const UpstreamHead& head) { answer->status = head.status; };
    events.on_bytes = [answer](const std::string& bytes) { answer->body += bytes; };
    events.on_end = [answer, path, then = std::move(then)](const Status& status) {
      if (!status.ok() || answer->status == 200) return then(status, answer->body);
      then(unavailable(path + " answers " + std::to_string(answer->status)), "");
    };
    UpstreamRequest request{.url = nodes_.node(index).url, .method = "GET", .target = path};
    if (!config_.api_key.empty()) request.authorization = "Bearer " + config_.api_key;
    request.seconds = kHealthSeconds;
    start_upstream(io_, std::move(request), std::move(events));
  }

  void log(LogLevel level, const std::string& line) const {
    if (config_.http.log_sink) config_.http.log_sink(level, line);
  }

  const RouterConfig config_;
  NodeTable nodes_;
  std::atomic<bool> draining_{false}, stopped_{false};
  std::atomic<int64_t> num_live_{0};
  boost::asio::io_context io_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{io_.get_executor()};
  const RelayContext relays_;
  std::thread thread_;
  std::unique_ptr<HttpServer> http_;  // its threads use the above
};

}  // namespace

Result<std::unique_ptr<Router>> Router::make(RouterConfig config) {
  auto router = std::make_unique<RouterImpl>(std::move(config));
  if (Status status = router->listen(); !status.ok()) return status;
  return std::unique_ptr<Router>(std::move(router));
}

}  // namespace fp4moe
