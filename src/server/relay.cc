#include "server/relay.h"

#include <set>
#include <utility>

#include "server/errors.h"
#include "server/json.h"
#include "server/upstream.h"

namespace fp4moe {
namespace {

constexpr size_t kMaxCollectedBytes = size_t{1} << 30;  // of an answer that is not a stream

// Everything runs on the exchange.
class Relay : public std::enable_shared_from_this<Relay> {
 public:
  Relay(const RelayContext& context, std::shared_ptr<HttpExchange> exchange)
      : context_(context), exchange_(std::move(exchange)) {
    context_.num_live.fetch_add(1);
  }
  ~Relay() {
    close();
    context_.num_live.fetch_sub(1);
  }

  void start(bool is_generation) {
    if (is_generation) {
      Result<json> body = parse_json(exchange_->request().body);
      if (body.ok() && !body->is_object()) body = invalid_argument("the body is no JSON object");
      if (!body.ok()) return exchange_->respond(error_response(body.status()));
      prefill_ = context_.nodes.acquire("prefill");
      if (prefill_ == NodeTable::kNone)
        return exchange_->respond(error_response(unavailable(context_.nodes.problems("prefill"))));
      const RouterNode node = context_.nodes.node(prefill_);
      (*body)["bootstrap_host"] = node.url.host;
      (*body)["bootstrap_port"] = node.bootstrap_port;
      body_ = to_text(*body);
    } else {
      body_ = exchange_->request().body;
    }
    exchange_->on_disconnect([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->abandon();
    });
    try_next();
  }

 private:
  void try_next() {
    decode_ = context_.nodes.acquire("decode", tried_);
    if (decode_ == NodeTable::kNone) return respond(503, context_.nodes.problems("decode"));
    tried_.insert(decode_);
    const HttpRequest& asked = exchange_->request();
    UpstreamRequest request{.url = context_.nodes.node(decode_).url,
                            .method = asked.method,
                            .target = asked.path + (asked.query.empty() ? "" : "?" + asked.query),
                            .authorization = asked.authorization,
                            .api_key = asked.api_key,
                            .body = body_};
    // Each piece is handed to the exchange, in order.
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
    is_stream_ = head.status == 200 && head.content_type.rfind("text/event-stream", 0) == 0;
    if (is_stream_) exchange_->start_stream(head.content_type);
  }

  void on_bytes(const std::string& bytes) {
    if (is_stream_) return exchange_->write(bytes);
    collected_ += bytes;
    if (collected_.size() <= kMaxCollectedBytes) return;
    abandon();
    respond(502, name() + ": its answer has more than " + std::to_string(kMaxCollectedBytes) + " bytes");
  }

  void on_end(const Status& status) {
    call_ = nullptr;
    if (status.ok()) return complete();
    const std::string problem = name() + ": " + status.message();
    if (context_.nodes.set_down(decode_, status.message())) context_.log(LogLevel::kWarning, problem);
    context_.nodes.release(std::exchange(decode_, NodeTable::kNone), /*failed=*/true);
    if (head_.status == 0 && status.code() == StatusCode::kUnavailable)
      return try_next();  // nothing was sent
    if (!is_stream_) return respond(502, problem);
    close();
    exchange_->write("data: " + error_body(unavailable(problem), "") + "\n\ndata: [DONE]\n\n");
    exchange_->finish();
  }

  void complete() {
    close();
    if (is_stream_) return exchange_->finish();
    HttpResponse response{.status = head_.status, .body = std::move(collected_)};
    response.content_type = head_.content_type;
    if (!head_.retry_after.empty()) response.extra_headers += "Retry-After: " + head_.retry_after + "\r\n";
    if (!head_.allow.empty()) response.extra_headers += "Allow: " + head_.allow + "\r\n";
    exchange_->respond(std::move(response));
  }

  void respond(int status, const std::string& problem) {
    close();
    HttpResponse response = error_response(unavailable(problem));
    response.status = status;
    exchange_->respond(std::move(response));
  }

  // Nobody waits for the answer any more; the closed connection tells the node.
  void abandon() {
    if (const auto call = std::exchange(call_, nullptr)) call->cancel();
    close();
  }

  // It is answered or abandoned: what still comes is dropped, and the nodes are others'.
  void close() {
    over_ = true;
    for (size_t* node : {&prefill_, &decode_})
      if (*node != NodeTable::kNone)
        context_.nodes.release(std::exchange(*node, NodeTable::kNone), /*failed=*/false);
  }

  std::string name() const { return "decode node " + context_.nodes.node(decode_).name; }

  const RelayContext context_;
  const std::shared_ptr<HttpExchange> exchange_;
  std::string body_, collected_;
  std::set<size_t> tried_;
  size_t prefill_ = NodeTable::kNone, decode_ = NodeTable::kNone;
  std::shared_ptr<UpstreamCall> call_;
  UpstreamHead head_;
  bool is_stream_ = false;
  bool over_ = false;  // close()
};

}  // namespace

void relay_generation(const RelayContext& context, std::shared_ptr<HttpExchange> exchange) {
  std::make_shared<Relay>(context, std::move(exchange))->start(/*is_generation=*/true);
}

void relay_plain(const RelayContext& context, std::shared_ptr<HttpExchange> exchange) {
  std::make_shared<Relay>(context, std::move(exchange))->start(/*is_generation=*/false);
}

}  // namespace fp4moe
