#include "server/api/routes.h"

#include "server/api/apis.h"
#include "server/api/chat_page.h"
#include "server/api/info_api.h"
#include "server/api/load_api.h"
#include "server/api/openapi.h"
#include "server/api/responses_api.h"
#include "server/api/tokenize_api.h"
#include "server/api/weights_api.h"
#include "server/http/cors.h"
#include "server/http/request_id.h"
#include "server/http/route_path.h"

namespace fp4moe {

namespace {

constexpr size_t kMaxWarnings = 256;  // number of distinct unknown fields that are logged
constexpr size_t kMaxShown = 80;      // bytes shown of a name or path that a client sent

HttpResponse wrong_method(const HttpRequest& request, const std::string& allowed) {
  HttpResponse response =
      error_response(invalid_argument(request.path.substr(0, kMaxShown) + " supports only " + allowed +
                                      ", got " + request.method.substr(0, kMaxShown)));
  response.status = 405;
  response.extra_headers = "Allow: " + allowed + "\r\n";
  return response;
}

bool is_page(const HttpRequest& request) {
  return request.path == "/" || request.path == "/chat" || request.path == "/chat/";
}

// Served without a key; the page's own API requests need one.
HttpResponse page(const HttpRequest& request) {
  return request.method == "GET" || request.method == "HEAD" ? chat_page() : wrong_method(request, "GET");
}

// The id that a generation request's body gives it; empty if it gives none or several.
std::string given_id(const json& body) {
  for (const char* name : {"rid", "request_id"})
    if (body.is_object() && body.contains(name) && body[name].is_string()) return body[name];
  return "";
}

// A client's X-Request-Id as the id of a request whose body has none. It is reserved until the request is
// submitted, because two requests with the same header may arrive together; the second one gets a fresh id.
class HeaderId {
 public:
  static constexpr const char* kField = "rid";

  HeaderId(LiveRequests& live, const std::string& id, json& body) : live_(live), id_(id) {
    const auto has = [&body](const char* name) { return body.contains(name) && !body[name].is_null(); };
    if (id.empty() || !body.is_object() || has(kField) || has("request_id")) return;
    ticket_ = live.reserve(id);
    if (is_used()) body[kField] = id;
  }
  ~HeaderId() { release(); }
  HeaderId(const HeaderId&) = delete;
  HeaderId& operator=(const HeaderId&) = delete;

  bool is_used() const { return ticket_ != 0; }
  void release() const { live_.release(id_, ticket_); }

 private:
  LiveRequests& live_;
  const std::string id_;
  uint64_t ticket_ = 0;
};

}  // namespace

// is_route() compares a request's path with these.
const std::vector<ServerRoutes::Route> ServerRoutes::kRoutes = {
    {"POST", "/v1/chat/completions", Access::kClient, nullptr, parse_chat},
    {"POST", "/v1/completions", Access::kClient, nullptr, parse_completion},
    {"POST", "/v1/messages", Access::kClient, nullptr, parse_messages, ErrorShape::kAnthropic},
    {"POST", "/v1/messages/count_tokens", Access::kClient, &ServerRoutes::count_tokens, nullptr,
     ErrorShape::kAnthropic},
    {"POST", "/generate", Access::kClient, nullptr, parse_generate},
    {"POST", "/v1/responses", Access::kClient, nullptr, nullptr, ErrorShape::kOpenAi, parse_responses},
    {"GET", kResponsesPath, Access::kClient, &ServerRoutes::stored_responses, nullptr},
    {"DELETE", kResponsesPath, Access::kClient, &ServerRoutes::stored_responses, nullptr},
    {"POST", kResponsesPath, Access::kClient, &ServerRoutes::stored_responses, nullptr},
    {"GET", "/v1/models", Access::kClient, &ServerRoutes::plain<models_response>, nullptr},
    {"GET", "/v1/models/", Access::kClient, &ServerRoutes::plain<model_response>, nullptr},
    {"POST", "/tokenize", Access::kClient, &ServerRoutes::plain<tokenize_response>, nullptr},
    {"POST", "/detokenize", Access::kClient, &ServerRoutes::plain<detokenize_response>, nullptr},
    {"POST", "/apply-template", Access::kClient, &ServerRoutes::plain<apply_template_response>, nullptr},
    {"GET", "/model_info", Access::kClient, &ServerRoutes::plain<model_info_response>, nullptr},
    {"GET", "/get_model_info", Access::kClient, &ServerRoutes::plain<model_info_response>, nullptr},
    {"GET", "/version", Access::kClient, &ServerRoutes::plain<version_response>, nullptr},
    {"GET", "/get_load", Access::kClient, &ServerRoutes::plain<load_response>, nullptr},
    {"GET", "/v1/loads", Access::kClient, &ServerRoutes::plain<loads_response>, nullptr},
    {"GET", "/props", Access::kClient, &ServerRoutes::plain<props_response>, nullptr},
    {"GET", "/slots", Access::kClient, &ServerRoutes::plain<slots_response>, nullptr},
    {"GET", "/server_info", Access::kClient, &ServerRoutes::server_info, nullptr},
    {"GET", "/get_server_info", Access::kClient, &ServerRoutes::server_info, nullptr},
    {"POST", "/abort_request", Access::kAdmin, &ServerRoutes::abort_request, nullptr},
    {"GET", "/openapi.json", Access::kClient, &ServerRoutes::openapi, nullptr},
    {"GET", "/health_generate", Access::kClient, nullptr, nullptr},
    {"POST", "/flush_cache", Access::kAdmin, &ServerRoutes::flush_cache, nullptr},
    {"POST", "/update_weights_from_disk", Access::kAdmin, &ServerRoutes::update_weights, nullptr},
    {"POST", "/rebalance_experts", Access::kAdmin, &ServerRoutes::rebalance_experts, nullptr},
    {"GET", "/metrics", Access::kOpen, &ServerRoutes::metrics, nullptr},
    {"GET", "/expert_load", Access::kClient, &ServerRoutes::expert_load, nullptr},
    {"GET", "/expert_load.svg", Access::kClient, &ServerRoutes::expert_load_svg, nullptr},
};

void ServerRoutes::set_engine(Engine& engine) {
  metrics_.startup_seconds.store(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - made_).count());
  load_watch_.emplace([&engine] { return engine.expert_load(); });
  engine_.store(&engine);
}

void ServerRoutes::count_response(const HttpRequest& request, int status) {
  metrics_.responses[static_cast<size_t>(status) % Metrics::kStatuses].fetch_add(1);
  log(LogLevel::kDebug,
      (request.method.empty() ? "unreadable request"
                              : request.method.substr(0, 20) + " " + request.path.substr(0, 200)) +
          " " + std::to_string(status));
}

ServerRoutes::Match ServerRoutes::find_route(const HttpRequest& request) {
  Match match;
  for (const Route& r : kRoutes) {
    if (!is_route(r.path, request.path)) continue;
    match.allowed += (match.allowed.empty() ? "" : ", ") + std::string(r.method);
    match.access = r.access;
    match.errors = r.errors;
    if (request.method == r.method || (request.method == "HEAD" && r.method == std::string("GET")))
      match.route = &r;
  }
  return match;
}

std::optional<HttpResponse> ServerRoutes::respond_to_head(const HttpRequest& request) const {
  if (auto preflight = respond_to_preflight(config_, request)) return preflight;
  if (is_route("/health", request.path)) return health(request);
  if (is_route("/ping", request.path)) return without_body(health(request));
  if (is_page(request)) return page(request);
  const Match match = find_route(request);
  std::optional<HttpResponse> refusal = refuse(request, match);
  if (!refusal) return std::nullopt;
  refusal = shaped(match.errors, std::move(*refusal));
  if (is_generation(match.route)) refusal->extra_headers += request_id_header(request.request_id);
  return refusal;
}

HttpResponse ServerRoutes::shape_error(const HttpRequest& request, HttpResponse error) {
  return shaped(find_route(request).errors, std::move(error));
}

std::optional<HttpResponse> ServerRoutes::refuse(const HttpRequest& request, const Match& match) const {
  if (auto refusal = refuse_access(config_, match.access, request)) return refusal;
  if (match.allowed.empty())
    return error_response(not_found("no route " + request.path.substr(0, kMaxShown)));
  if (match.route == nullptr) return wrong_method(request, match.allowed);
  if (engine_.load() == nullptr) return error_response(unavailable("the model is still loading"));
  if (match.route->plain == nullptr && draining_.load())
    return error_response(unavailable("the server is shutting down"));
  return std::nullopt;
}

void ServerRoutes::handle(const std::shared_ptr<HttpExchange>& exchange) {
  const HttpRequest& request = exchange->request();
  const Route& found = *find_route(request).route;
  Engine& engine = *engine_.load();
  if (is_generation(&found)) exchange->set_headers(request_id_header(request.request_id));
  if (!request.body.empty()) {
    const Result<int64_t> bytes = parsed_json_bytes(request.body);
    if (!bytes.ok()) return exchange->respond(shaped(found.errors, error_response(bytes.status())));
    if (!exchange->hold(*bytes))
      return exchange->respond(shaped(
          found.errors, error_response(unavailable(
                            "the parsed JSON of incoming requests needs more than max_buffered_bytes=" +
                            std::to_string(config_.max_buffered_bytes) + " bytes of memory"))));
  }
  if (found.plain != nullptr)
    return exchange->respond(shaped(found.errors, (this->*found.plain)(engine, request)));
  if (found.generate == nullptr && found.generate_stored == nullptr)
    return run(engine, exchange, make_health_probe());
  generate(engine, found, exchange);
}

void ServerRoutes::generate(Engine& engine, const Route& r, const std::shared_ptr<HttpExchange>& exchange) {
  Result<json> body = parse_json(exchange->request().body);
  if (!body.ok()) return exchange->respond(shaped(r.errors, error_response(body.status())));
  const HeaderId header_id(*live_, exchange->request().request_id, *body);
  if (const std::string id = given_id(*body); !id.empty()) exchange->set_headers(request_id_header(id));
  Fields fields(*body);
  check_model(engine.info(), config_, fields);
  GenerationCall call;
  if (fields.ok() && r.generate != nullptr) call = r.generate(engine, fields);
  if (fields.ok() && r.generate_stored != nullptr) {
    const ResponseAccess access{responses_, client_key(config_, exchange->request()),
                                [&exchange](int64_t bytes) { return exchange->hold(bytes); }};
    call = r.generate_stored(engine, access, fields);
  }
  read_prefill_node(engine, fields, call);
  std::vector<std::string> unknown = fields.unknown();
  if (header_id.is_used()) std::erase(unknown, HeaderId::kField);
  if (fields.ok() && config_.strict_requests && !unknown.empty())
    fields.fail(unknown.front().substr(0, kMaxShown),
                "is not a field of " + std::string(r.path) +
                    " (--strict-requests is on; without it such fields are ignored)");
  if (!fields.ok()) {
    header_id.release();  // the client may send it again as soon as it has this response
    return exchange->respond(shaped(r.errors, error_response(fields.error(), fields.param())));
  }
  warn_unknown(r.path, unknown);
  run(engine, exchange, std::move(call));
}

void ServerRoutes::run(Engine& engine, const std::shared_ptr<HttpExchange>& exchange, GenerationCall call) {
  if (!call.name.empty()) exchange->set_headers(request_id_header(call.name));
  run_generation({&engine, &metrics_, &config_, live_}, exchange, std::move(call));
}

void ServerRoutes::warn_unknown(const std::string& path, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    std::lock_guard<std::mutex> lock(warned_mutex_);
    if (warned_.size() < kMaxWarnings && warned_.insert(path + " " + name.substr(0, kMaxShown)).second)
      log(LogLevel::kWarning, path + ": unknown field " + name.substr(0, kMaxShown) + " is ignored");
  }
}

HttpResponse ServerRoutes::health(const HttpRequest& request) const {
  if (request.method != "GET" && request.method != "HEAD") return wrong_method(request, "GET");
  if (draining_.load()) return error_response(unavailable("the server is shutting down"));
  if (engine_.load() == nullptr) return error_response(unavailable("the model is still loading"));
  return json_response({{"status", "ok"}});
}

HttpResponse ServerRoutes::stored_responses(Engine&, const HttpRequest& request) {
  return stored_response(responses_, client_key(config_, request), request);
}

HttpResponse ServerRoutes::count_tokens(Engine& engine, const HttpRequest& request) {
  const Result<json> body = parse_json(request.body);
  if (!body.ok()) return error_response(body.status());
  Fields fields(*body);
  check_model(engine.info(), config_, fields);
  const int64_t count = fields.ok() ? count_message_tokens(engine, fields) : 0;
  if (!fields.ok()) return error_response(fields.error(), fields.param());
  return json_response({{"input_tokens", count}});
}

HttpResponse ServerRoutes::abort_request(Engine& engine, const HttpRequest& request) {
  const Result<json> body = parse_json(request.body);
  if (!body.ok()) return error_response(body.status());
  Fields fields(*body);
  const std::string id = fields.string("rid", "");
  const bool all = fields.boolean("abort_all", false);
  if (id.empty() && !all) fields.fail("rid", "is missing: send the id of a request, or \"abort_all\": true");
  if (!fields.ok()) return error_response(fields.error(), fields.param());
  const std::vector<std::string> ids = all ? live_->all() : live_->of(id);
  for (const std::string& live : ids) engine.cancel(live);
  return json_response({{"num_aborted", ids.size()}});
}

HttpResponse ServerRoutes::openapi(Engine& engine, const HttpRequest&) {
  return json_response(openapi_document(engine));
}

HttpResponse ServerRoutes::metrics(Engine& engine, const HttpRequest&) {
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = print_metrics(metrics_, engine.info(), engine.stats(), gauges_(), config_.metrics_prefix);
  return response;
}

// SGLang's responses: plain text, and 400 while requests run.
HttpResponse ServerRoutes::flush_cache(Engine& engine, const HttpRequest&) {
  const Status status = engine.flush_cache();
  HttpResponse response{.body = "Cache flushed.\n", .content_type = "text/plain; charset=utf-8"};
  if (status.ok()) return response;
  response = error_response(status);
  response.status = 400;
  return response;
}

HttpResponse ServerRoutes::update_weights(Engine& engine, const HttpRequest& request) {
  if (is_updating_.exchange(true)) return update_in_progress_response();
  HttpResponse response = update_weights_response(engine, request);
  is_updating_.store(false);
  return response;
}

HttpResponse ServerRoutes::rebalance_experts(Engine& engine, const HttpRequest&) {
  const Result<ExpertMoves> moves = engine.rebalance_experts();
  if (!moves.ok()) return error_response(moves.status());
  return json_response({{"num_layers", moves->num_layers},
                        {"num_experts", moves->num_experts},
                        {"num_bytes", moves->num_bytes},
                        {"imbalance_before", moves->imbalance_before},
                        {"imbalance_after", moves->imbalance_after},
                        {"seconds", moves->seconds},
                        {"copy_seconds", moves->copy_seconds}});
}

HttpResponse ServerRoutes::server_info(Engine& engine, const HttpRequest&) {
  const ModelInfo& info = engine.info();
  const EngineStats stats = engine.stats();
  return json_response(
      {{"model_path", engine.weight_source().model_path},
       {"served_model_name", info.name},
       {"architecture", info.architecture},
       {"quantization", info.quantization},
       {"backend", info.backend},
       {"vocab_size", info.vocab_size},
       {"num_layers", info.num_layers},
       {"hidden_size", info.hidden_size},
       {"num_experts", info.num_experts},
       {"top_k", info.top_k},
       {"context_length", info.context_length},
       {"speculative_algorithm",
        info.speculative_algorithm.empty() ? json(nullptr) : json(info.speculative_algorithm)},
       {"avg_spec_accept_length", stats.spec_accept_length()},
       {"spec_proposed_by_position", stats.spec_proposed_by_position},
       {"spec_correct_by_position", stats.spec_correct_by_position},
       {"disaggregation_mode", info.disaggregation_mode},
       {"disaggregation_bootstrap_port", info.disaggregation_bootstrap_port},
       {"page_size", info.page_size},
       {"max_total_num_tokens", info.max_total_tokens},
       {"weight_bytes", info.weight_bytes},
       {"kv_bytes", info.kv_bytes},
       {"plan", info.startup_lines},
       {"num_running_reqs", stats.num_running_reqs},
       {"num_queue_reqs", stats.num_queue_reqs},
       {"num_used_tokens", stats.num_used_tokens},
       {"last_gen_throughput", stats.gen_throughput},
       {"uptime_seconds", stats.uptime_seconds},
       {"version", FP4MOE_VERSION}});
}

HttpResponse ServerRoutes::expert_load(Engine& engine, const HttpRequest& request) {
  return expert_load_response(*load_watch_, engine.info(), request, LoadForm::kJson);
}

HttpResponse ServerRoutes::expert_load_svg(Engine& engine, const HttpRequest& request) {
  return expert_load_response(*load_watch_, engine.info(), request, LoadForm::kSvg);
}

void ServerRoutes::log(LogLevel level, const std::string& line) const {
  if (config_.log_sink) config_.log_sink(level, line);
}

}  // namespace fp4moe
