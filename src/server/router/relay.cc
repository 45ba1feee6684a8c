#include "server/router/relay.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "server/http/request_id.h"
#include "server/http/route_path.h"
#include "server/json.h"
#include "server/router/upstream.h"

namespace fp4moe {
namespace {

constexpr size_t kMaxEventBytes = 1 << 20;    // longer events are forwarded in pieces
constexpr int64_t kMaxAheadBytes = 64 << 10;  // unsent bytes of a stream beyond which no more are read

// The end of the last complete event; 0 if none ends in the last `num_new` bytes (earlier ones were searched
// before).
size_t events_end(std::string_view text, size_t num_new) {
  constexpr size_t kMostSeparator = 4;
  const size_t begin = text.size() - std::min(text.size(), num_new + kMostSeparator - 1);
  size_t end = 0;
  for (const std::string_view separator : {"\n\n", "\r\n\r\n"})
    if (const size_t at = text.substr(begin).rfind(separator); at != std::string_view::npos)
      end = std::max(end, begin + at + separator.size());
  return end;
}

// Keeps a request of /v1/responses from storing its response on a decode node, and refuses one that continues
// a stored response.
Status without_store(json& body) {
  const auto previous = body.find("previous_response_id");
  if (previous != body.end() && !previous->is_null()) return unsupported(kNoStoredResponses);
  body["store"] = false;
  return {};
}

// Runs on the exchange: upstream events are posted to it.
class Relay : public std::enable_shared_from_this<Relay> {
 public:
  Relay(const RelayContext& context, std::shared_ptr<HttpExchange> exchange, ErrorShape errors)
      : context_(context), exchange_(std::move(exchange)), errors_(errors) {
    context_.num_live.fetch_add(1);
  }
  ~Relay() {
    close();
    context_.num_live.fetch_sub(1);
  }

  void start(bool is_generation) {
    if (is_generation) {
      Result<json> body = parse_json(exchange_->request().body);
      if (body.ok() && !body->is_object()) body = invalid_argument("the body is not a JSON object");
      if (!body.ok()) return exchange_->respond(shaped(errors_, error_response(body.status())));
      if (is_route("/v1/responses", exchange_->request().path))
        if (const Status status = without_store(*body); !status.ok())
          return exchange_->respond(
              error_response(status.with_context("previous_response_id"), "previous_response_id"));
      prefill_ = context_.nodes.acquire("prefill");
      if (!prefill_) return respond(503, context_.nodes.problems("prefill"));
      const RouterNode node = context_.nodes.node(prefill_.index());
      (*body)["bootstrap_host"] = node.url.host;
      (*body)["bootstrap_port"] = node.bootstrap_port;
      body_ = to_text(*body);
    } else {
      body_ = exchange_->request().body;
    }
    exchange_->on_disconnect([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->abandon();
    });
    exchange_->on_sent([weak = weak_from_this()] {
      if (const auto self = weak.lock(); self && self->is_waiting_) self->read_on();
    });
    try_next();
  }

 private:
  void try_next() {
    decode_ = context_.nodes.acquire("decode", tried_);
    if (!decode_) return respond(503, context_.nodes.problems("decode"));
    decode_.count_request();
    if (tried_.empty()) prefill_.count_request();
    tried_.insert(decode_.index());
    const RouterNode node = context_.nodes.node(decode_.index());
    name_ = "decode node " + node.name;
    const HttpRequest& asked = exchange_->request();
    UpstreamRequest request{.url = node.url,
                            // The response to HEAD has the length of the body that GET returns.
                            .method = asked.method == "HEAD" ? "GET" : asked.method,
                            .target = asked.path + (asked.query.empty() ? "" : "?" + asked.query),
                            .authorization = asked.authorization,
                            .api_key = asked.api_key,
                            .request_id = asked.request_id,
                            .body = body_,
                            .seconds = context_.config.request_timeout_seconds,
                            .quiet_seconds = context_.config.quiet_timeout_seconds,
                            .is_paced = true};
    // Post each upstream event to the exchange, in order.
    const auto handed = [self = shared_from_this()](auto&& task) {
      self->exchange_->post([self, task] {
        if (!self->over_) task(*self);
      });
    };
    UpstreamEvents events;
    events.on_head = [handed](const UpstreamHead& head) { handed([head](Relay& r) { r.on_head(head); }); };
    events.on_bytes = [handed](std::string bytes) {
      handed([bytes = std::move(bytes)](Relay& r) { r.on_bytes(bytes); });
    };
    events.on_end = [handed](const Status& status) { handed([status](Relay& r) { r.on_end(status); }); };
    call_ = start_upstream(context_.io, std::move(request), std::move(events));
  }

  void on_head(const UpstreamHead& head) {
    head_ = head;
    exchange_->set_headers(request_id_header(head.request_id));
    if (head_.is_event_stream()) exchange_->start_stream(head.content_type);
  }

  void on_bytes(const std::string& bytes) {
    collected_ += bytes;
    context_.held_bytes.fetch_add(std::ssize(bytes));
    num_held_ += std::ssize(bytes);
    if (head_.is_event_stream()) {
      pass_on(collected_.size() > kMaxEventBytes ? collected_.size() : events_end(collected_, bytes.size()));
    } else if (std::ssize(collected_) > context_.config.max_response_bytes) {
      return give_up(502, "its response has more than " + std::to_string(context_.config.max_response_bytes) +
                              " bytes (--max-response-bytes)");
    }
    if (context_.held_bytes.load() > context_.config.max_held_bytes)
      return give_up(503, "the router holds more than " + std::to_string(context_.config.max_held_bytes) +
                              " bytes of unfinished responses (--max-held-response-bytes)");
    read_on();
  }

  // Reads the next piece, or waits until the client has received the earlier ones: a slow client slows down
  // the node's response instead of filling the router's memory.
  void read_on() {
    if (over_ || !call_) return;
    is_waiting_ = exchange_->unsent_bytes() > kMaxAheadBytes;
    if (!is_waiting_) call_->read_on();
  }

  // Forwards the first `end` collected bytes of a stream.
  void pass_on(size_t end) {
    if (end == 0) return;
    std::string rest = collected_.substr(end);
    collected_.resize(end);
    exchange_->write(std::exchange(collected_, std::move(rest)));
    context_.held_bytes.fetch_sub(static_cast<int64_t>(end));
    num_held_ -= static_cast<int64_t>(end);
  }

  void on_end(const Status& status) {
    call_ = nullptr;
    if (status.ok()) return complete();
    const std::string problem = name_ + ": " + status.message();
    const bool was_sent = head_.status != 0 || status.code() != StatusCode::kUnavailable;
    const bool is_unreachable = status.code() == StatusCode::kUnavailable;
    if (is_unreachable && context_.nodes.set_down(decode_.index(), status.message()))
      context_.log(LogLevel::kWarning, problem);
    // Other failures may concern this request only: a health check decides whether the node is down.
    if (!is_unreachable && status.code() != StatusCode::kDeadline) context_.check_node(decode_.index());
    decode_.release(/*failed=*/true);
    if (!was_sent) return try_next();
    fail(status.code() == StatusCode::kDeadline ? 504 : 502, problem);
  }

  void complete() {
    if (head_.is_event_stream()) {
      pass_on(collected_.size());
      close();
      return exchange_->finish();
    }
    HttpResponse response{.status = head_.status, .body = std::move(collected_)};
    close();
    response.content_type = head_.content_type;
    if (!head_.retry_after.empty()) response.extra_headers += "Retry-After: " + head_.retry_after + "\r\n";
    if (!head_.allow.empty()) response.extra_headers += "Allow: " + head_.allow + "\r\n";
    exchange_->respond(std::move(response));
  }

  // Cancels the upstream call and fails.
  void give_up(int status, const std::string& problem) {
    if (const auto call = std::exchange(call_, nullptr)) call->cancel();
    decode_.release(/*failed=*/true);
    fail(status, name_ + ": " + problem);
  }

  // Responds with an error, or ends a started stream with one.
  void fail(int status, const std::string& problem) {
    if (!head_.is_event_stream()) return respond(status, problem);
    close();
    exchange_->write(last_events(errors_, unavailable(problem)));
    exchange_->finish();
  }

  void respond(int status, const std::string& problem) {
    close();
    HttpResponse response = error_response(unavailable(problem));
    response.status = status;
    exchange_->respond(shaped(errors_, std::move(response)));
  }

  // Called when the client has disconnected: closing the upstream connection cancels the request on the node.
  void abandon() {
    if (const auto call = std::exchange(call_, nullptr)) call->cancel();
    close();
  }

  // Called when the relay is finished: later upstream events are dropped, and the node leases are released.
  void close() {
    over_ = true;
    prefill_.release();
    decode_.release();
    collected_ = {};
    context_.held_bytes.fetch_sub(std::exchange(num_held_, 0));
  }

  const RelayContext context_;
  const std::shared_ptr<HttpExchange> exchange_;
  const ErrorShape errors_;
  std::string body_;
  std::string collected_;  // a stream's bytes that are not forwarded yet
  int64_t num_held_ = 0;   // this request's share of context_.held_bytes
  std::set<size_t> tried_;
  NodeLease prefill_, decode_;
  std::string name_;  // of the decode node
  std::shared_ptr<UpstreamCall> call_;
  UpstreamHead head_;
  bool is_waiting_ = false;  // for the client, before the next piece is read
  bool over_ = false;        // close() was called
};

}  // namespace

void relay_generation(const RelayContext& context, std::shared_ptr<HttpExchange> exchange,
                      ErrorShape errors) {
  std::make_shared<Relay>(context, std::move(exchange), errors)->start(/*is_generation=*/true);
}

void relay_plain(const RelayContext& context, std::shared_ptr<HttpExchange> exchange, ErrorShape errors) {
  std::make_shared<Relay>(context, std::move(exchange), errors)->start(/*is_generation=*/false);
}

}  // namespace fp4moe
