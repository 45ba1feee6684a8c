// The server's routes, their access rules and their handlers.
#pragma once

#include <atomic>
#include <chrono>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "fp4moe/server.h"
#include "server/api/generation.h"
#include "server/api/response_items.h"
#include "server/api/response_store.h"
#include "server/api/route_context.h"
#include "server/http/auth.h"
#include "server/http/errors.h"
#include "server/http/http.h"
#include "server/json.h"
#include "server/observe/load_history.h"
#include "server/observe/metrics.h"

namespace fp4moe {

// Thread-safe.
// Large because each route that generates nothing is a method.
class ServerRoutes {
 public:
  // `gauges` reads the gauges of the HTTP server. It is called only after set_engine().
  ServerRoutes(const ServerConfig& config, std::function<HttpGauges()> gauges)
      : config_(config), gauges_(std::move(gauges)), responses_(config.max_stored_response_bytes) {}

  // Until this call, every route except the chat page returns 503.
  void set_engine(Engine& engine);
  Engine* engine() const { return engine_.load(); }  // null before set_engine()
  // After this call, generation requests get 503.
  void start_draining() { draining_.store(true); }
  void wait_for_live_requests() { live_->wait_for_none(); }

  // Responses that need no body, including all refusals, so that clients don't upload a body in vain.
  std::optional<HttpResponse> respond_to_head(const HttpRequest& request) const;
  // Handles a request that respond_to_head() let through.
  void handle(const std::shared_ptr<HttpExchange>& exchange);
  void count_response(const HttpRequest& request, int status);
  // Returns an OpenAI error response in the shape of the request's API.
  static HttpResponse shape_error(const HttpRequest& request, HttpResponse error);

 private:
  using Plain = HttpResponse (ServerRoutes::*)(Engine&, const HttpRequest&);
  using Generate = GenerationCall (*)(const Engine&, Fields&);
  using GenerateStored = GenerationCall (*)(const Engine&, const ResponseAccess&, Fields&);
  struct Route {
    const char* method;
    const char* path;
    Access access;
    Plain plain;        // responds immediately; null: a generation route
    Generate generate;  // parses a generation request; null if `plain` is set, and for the one-token probe
    ErrorShape errors = ErrorShape::kOpenAi;
    GenerateStored generate_stored = nullptr;  // instead of `generate`: also uses the stored responses
  };
  static const std::vector<Route> kRoutes;
  struct Match {
    const Route* route = nullptr;  // null: the path does not support this method
    std::string allowed;           // the path's methods; empty: no such path
    Access access = Access::kClient;
    ErrorShape errors = ErrorShape::kOpenAi;
  };
  static Match find_route(const HttpRequest& request);
  static bool is_generation(const Route* r) { return r != nullptr && r->plain == nullptr; }

  std::optional<HttpResponse> refuse(const HttpRequest& request, const Match& match) const;
  void generate(Engine& engine, const Route& r, const std::shared_ptr<HttpExchange>& exchange);
  void run(Engine& engine, const std::shared_ptr<HttpExchange>& exchange, GenerationCall call);
  void warn_unknown(const std::string& path, const std::vector<std::string>& names);

  HttpResponse health(const HttpRequest& request) const;
  // A handler that needs no state of this class.
  template <HttpResponse (*respond)(const RouteContext&, const HttpRequest&)>
  HttpResponse plain(Engine& engine, const HttpRequest& request) {
    return respond({engine, config_, started_at_}, request);
  }
  HttpResponse stored_responses(Engine& engine, const HttpRequest& request);
  HttpResponse count_tokens(Engine& engine, const HttpRequest& request);
  HttpResponse abort_request(Engine& engine, const HttpRequest& request);
  HttpResponse openapi(Engine& engine, const HttpRequest& request);
  HttpResponse metrics(Engine& engine, const HttpRequest& request);
  HttpResponse flush_cache(Engine& engine, const HttpRequest& request);
  HttpResponse update_weights(Engine& engine, const HttpRequest& request);
  HttpResponse rebalance_experts(Engine& engine, const HttpRequest& request);
  HttpResponse server_info(Engine& engine, const HttpRequest& request);
  HttpResponse expert_load(Engine& engine, const HttpRequest& request);
  HttpResponse expert_load_svg(Engine& engine, const HttpRequest& request);

  void log(LogLevel level, const std::string& line) const;

  const ServerConfig& config_;
  const std::function<HttpGauges()> gauges_;
  std::atomic<Engine*> engine_{nullptr};
  std::atomic<bool> draining_{false};
  std::atomic<bool> is_updating_{false};  // in update_weights()
  const std::chrono::steady_clock::time_point made_ = std::chrono::steady_clock::now();
  const int64_t started_at_ = std::time(nullptr);
  Metrics metrics_;
  std::shared_ptr<LiveRequests> live_ = std::make_shared<LiveRequests>();
  ResponseStore responses_;
  std::mutex warned_mutex_;
  std::set<std::string> warned_;
  std::optional<LoadWatch> load_watch_;  // constructed before engine_ is set
};

}  // namespace fp4moe
