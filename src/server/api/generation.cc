#include "server/api/generation.h"

#include <algorithm>
#include <chrono>
#include <deque>

#include "server/api/request_log.h"
#include "server/http/auth.h"
#include "server/http/errors.h"

namespace fp4moe {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kShortResponse = 16384;  // in JSON values: printed in a few milliseconds
// Bytes, unsent or of unprocessed deltas, beyond which a cumulative stream leaves out events.
constexpr int64_t kBehindBytes = 64 << 10;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

// Bytes of the delta's texts and lists. Texts of one or two tokens are stored inside their string objects
// (SSO).
int64_t output_bytes(const Delta& delta) {
  size_t bytes = delta.text.size() + delta.token_ids.size() * sizeof(int32_t);
  if (delta.routed_experts != nullptr) bytes += delta.routed_experts->size() * sizeof(int32_t);
  for (const auto* positions : {&delta.logprobs, &delta.prompt_logprobs})
    for (const PositionLogprobs& position : *positions)
      bytes += sizeof position + (position.top.size() + position.ids.size()) * sizeof(TokenLogprob);
  return static_cast<int64_t>(bytes);
}

// Merges the next delta of a choice into those that wait for their event.
void append(Delta& waiting, const Delta& delta) {
  const auto add = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  Delta merged = delta;
  merged.text = waiting.text + delta.text;
  merged.token_ids.swap(waiting.token_ids);
  add(merged.token_ids, delta.token_ids);
  merged.logprobs.swap(waiting.logprobs);
  add(merged.logprobs, delta.logprobs);
  merged.prompt_logprobs.swap(waiting.prompt_logprobs);
  add(merged.prompt_logprobs, delta.prompt_logprobs);
  waiting = std::move(merged);
}

// Everything except the engine's callbacks runs on the exchange.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(const GenerationContext& context, std::shared_ptr<HttpExchange> exchange, GenerationCall call)
      : context_(context),
        exchange_(std::move(exchange)),
        name_(std::move(call.name)),
        stream_(call.stream),
        format_(std::move(call.format)),
        choices_(call.requests.size()),
        latest_(call.requests.size(), start_),
        streams_(call.requests.size()),
        unfinished_(call.requests.size()) {}

  void start(std::vector<Request> requests, const std::vector<PromptIds>& prompts) {
    exchange_->on_disconnect([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->abandon("the client has disconnected");
    });
    for (const Request& request : requests) ids_.push_back(request.id);
    for (size_t i = 0; i < requests.size(); ++i) {
      choices_[i].index = static_cast<int64_t>(i);
      choices_[i].request_id = ids_[i];
      choices_[i].prompt_ids = prompts[i];
      choices_[i].prompt_tokens = std::ssize(*prompts[i]);
      requests[i].input_ids = *prompts[i];
      context_.live->add(ids_[i], name_);
      Result<std::string> id = context_.engine->submit(std::move(requests[i]), callback(i));
      if (!id.ok()) {
        context_.live->done(ids_[i], name_);
        abandon(id.status().message());
        return exchange_->respond(format_->refusal(id.status()));
      }
      ++num_submitted_;
    }
    if (stream_ && format_->is_cumulative())  // keeps this object until the last event is sent
      exchange_->on_sent([self = shared_from_this()] {
        if (!self->over_) self->send_due();
      });
    if (stream_)
      exchange_->on_quiet(context_.config->keep_alive_seconds, [weak = weak_from_this()] {
        if (const auto self = weak.lock(); self && !self->over_) self->send_text(self->format_->keep_alive());
      });
  }

 private:
  // The engine may keep copies of the callback after the final delta. They share one owner, which is released
  // before LiveRequests::done(), because the server's shutdown waits for that count.
  DeltaCallback callback(size_t i) {
    auto owner = std::make_shared<std::shared_ptr<Generation>>(shared_from_this());
    return [owner, i, live = context_.live, id = ids_[i], name = name_](const Delta& delta) {
      std::shared_ptr<Generation> self = *owner;
      if (self == nullptr) return;
      const bool last = delta.finish_reason != FinishReason::kNone;
      if (last) owner->reset();
      self->hand_over(i, delta);
      self.reset();
      if (last) live->done(id, name);
    };
  }

  // On the engine's thread, which must not block: if the exchange falls too far behind, drop the request.
  // Each submission is cancelled at its own next delta, which also covers those submitted later.
  void hand_over(size_t i, const Delta& delta) {
    const int64_t bytes = static_cast<int64_t>(sizeof(Delta)) + output_bytes(delta);
    if (!behind_.load() && pending_bytes_.fetch_add(bytes) + bytes <= context_.config->max_unsent_bytes) {
      return exchange_->post([self = shared_from_this(), i, delta, bytes, now = Clock::now()] {
        self->pending_bytes_.fetch_sub(bytes);
        self->on_delta(i, delta, now);
      });
    }
    context_.engine->cancel(ids_[i]);
    if (behind_.exchange(true)) return;
    exchange_->post([self = shared_from_this()] {
      self->exchange_->drop("its unprocessed deltas exceed max_unsent_bytes=" +
                            std::to_string(self->context_.config->max_unsent_bytes));
    });
  }

  void on_delta(size_t i, const Delta& delta, Clock::time_point now) {
    if (over_ || behind_.load()) return;
    if (delta.finish_reason == FinishReason::kError) return fail(Status(delta.error_code, delta.error));
    measure(i, delta, now);
    output_bytes_ += output_bytes(delta);
    if (const int64_t most = context_.config->max_output_bytes; output_bytes_ > most)
      return fail(invalid_argument(
          "the outputs of this request have " + std::to_string(output_bytes_) +
          " bytes of text, tokens and log-probabilities; the limit is " + std::to_string(most) +
          " (--max-output-bytes): request fewer outputs, tokens or log-probabilities"));
    Choice& choice = choices_[i];
    choice.text += delta.text;
    choice.token_ids.insert(choice.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
    choice.logprobs.insert(choice.logprobs.end(), delta.logprobs.begin(), delta.logprobs.end());
    choice.prompt_logprobs.insert(choice.prompt_logprobs.end(), delta.prompt_logprobs.begin(),
                                  delta.prompt_logprobs.end());
    choice.routed_experts = delta.routed_experts;
    choice.finish_reason = delta.finish_reason;
    choice.matched_stop = delta.matched_stop;
    choice.matched_stop_token = delta.matched_stop_token;
    choice.cached_tokens = delta.cached_tokens;
    choice.completion_tokens = delta.completion_tokens;
    choice.spec_verify_ct = delta.spec_verify_ct;
    choice.spec_num_proposed_drafts = delta.spec_num_proposed_drafts;
    choice.spec_num_correct_drafts = delta.spec_num_correct_drafts;
    choice.spec_correct_drafts_histogram = delta.spec_correct_drafts_histogram;
    choice.seconds = seconds(now - start_);
    if (delta.finish_reason != FinishReason::kNone) --unfinished_;
    if (!stream_) {
      format_->collect(choice, delta);
      if (unfinished_ == 0) complete();
    } else if (format_->is_cumulative()) {
      if (ends_interval(i, delta)) make_due(i);
      send_due();
    } else {
      send_delta(i, delta);
      if (unfinished_ == 0) complete();
    }
  }

  // Whether an event is to follow this delta: one does after a choice's first tokens, after each
  // stream_interval tokens, and at its end.
  bool ends_interval(size_t i, const Delta& delta) {
    const int64_t interval = context_.config->stream_interval;
    const auto num_tokens = std::ssize(choices_[i].token_ids);
    int64_t& num_sent = streams_[i].num_tokens_sent;
    const bool has_text = interval == 1 && !delta.text.empty();
    const bool is_end = delta.finish_reason != FinishReason::kNone;
    if (!has_text && !is_end && num_tokens - num_sent < (num_sent == 0 ? 1 : interval)) return false;
    num_sent = num_tokens;
    return true;
  }

  void send_delta(size_t i, const Delta& delta) {
    if (context_.config->stream_interval == 1) return send_events(i, delta);
    Delta& waiting = streams_[i].waiting;
    append(waiting, delta);
    if (ends_interval(i, delta)) send_events(i, std::exchange(waiting, {}));
  }

  void send_events(size_t i, const Delta& delta) {
    const std::vector<json> events = format_->events(choices_[i], delta);
    send(events);
    choices_[i].started |= !events.empty();
  }

  void make_due(size_t i) {
    if (!std::exchange(streams_[i].is_due, true)) due_.push_back(i);
  }

  // Sends the due events of a cumulative stream, as long as the client keeps up and few deltas await
  // processing. Otherwise they remain due and will contain what arrives meanwhile.
  void send_due() {
    while (!over_ && !due_.empty() && exchange_->unsent_bytes() <= kBehindBytes &&
           pending_bytes_.load() <= kBehindBytes)
      send_next_due();
    if (!over_ && due_.empty() && unfinished_ == 0) complete();
  }

  void send_next_due() {
    const size_t i = due_.front();
    due_.pop_front();
    streams_[i].is_due = false;
    send_events(i, {});
  }

  void measure(size_t i, const Delta& delta, Clock::time_point now) {
    const auto tokens = static_cast<int64_t>(delta.token_ids.size());
    if (tokens > 0 && choices_[i].token_ids.empty()) {
      context_.metrics->time_to_first_token.observe(seconds(now - start_));
    } else if (tokens > 0) {
      context_.metrics->inter_token_latency.observe(seconds(now - latest_[i]) / static_cast<double>(tokens),
                                                    tokens);
    }
    if (tokens > 0) latest_[i] = now;
    if (delta.finish_reason != FinishReason::kNone)
      context_.metrics->e2e_request_latency.observe(seconds(now - start_));
  }

  void send(const std::vector<json>& events) {
    if (events.empty()) return;
    std::string text;
    for (const json& event : events) {
      if (format_->style() == StreamStyle::kNamed)
        text += "event: " + event["type"].get_ref<const std::string&>() + "\n";
      text += "data: " + to_text(event) + "\n\n";
    }
    send_text(std::move(text));
  }

  void send_text(std::string text) {
    if (!stream_started_) exchange_->start_stream("text/event-stream; charset=utf-8");
    stream_started_ = true;
    exchange_->write(std::move(text));
  }

  void complete() {
    over_ = true;
    log_finished(*context_.config, choices_, "");
    if (!stream_) {
      if (printed_values() <= kShortResponse) return respond();
      return exchange_->run_long([self = shared_from_this()] { self->respond(); });
    }
    finish_stream(format_->closing(choices_));
  }

  void finish_stream(const std::vector<json>& last_events) {
    send(last_events);
    if (format_->style() == StreamStyle::kData) send_text("data: [DONE]\n\n");
    exchange_->finish();
  }

  // The approximate number of JSON values in the response.
  size_t printed_values() const {
    size_t values = 0;
    for (const Choice& choice : choices_) {
      values += choice.prompt_ids->size() + choice.token_ids.size() + choice.text.size() / 64;
      for (const auto* positions : {&choice.logprobs, &choice.prompt_logprobs})
        if (!positions->empty())
          values += positions->size() * (1 + positions->back().top.size() + positions->back().ids.size());
    }
    return values;
  }

  void respond() {
    HttpResponse response;
    response.body = to_text(format_->whole(choices_));
    exchange_->respond(std::move(response));
  }

  void fail(const Status& status) {
    abandon(status.message());
    while (!due_.empty()) send_next_due();
    if (!stream_started_) return exchange_->respond(format_->refusal(status));
    finish_stream(format_->failure(status));
  }

  // Cancels the submissions that still run; their later deltas are ignored.
  void abandon(const std::string& why) {
    if (!over_) log_finished(*context_.config, choices_, why);
    over_ = true;
    for (size_t i = 0; i < num_submitted_; ++i)
      if (choices_[i].finish_reason == FinishReason::kNone) context_.engine->cancel(ids_[i]);
  }

  const GenerationContext context_;
  const std::shared_ptr<HttpExchange> exchange_;
  const std::string name_;  // the HTTP request's id
  const bool stream_;
  const std::unique_ptr<ApiFormat> format_;
  const Clock::time_point start_ = Clock::now();
  std::vector<std::string> ids_;  // of the submissions; constant from the first submission on
  size_t num_submitted_ = 0;      // a refused submission's id may belong to another request
  std::vector<Choice> choices_;
  std::vector<Clock::time_point> latest_;  // time of each choice's latest tokens
  struct Stream {                          // of a choice
    int64_t num_tokens_sent = 0;           // covered by events, sent or due
    Delta waiting;                         // tokens that wait for the end of their stream_interval
    bool is_due = false;                   // whether the choice is in due_
  };
  std::vector<Stream> streams_;
  std::deque<size_t> due_;  // choices whose event of a cumulative stream is due
  size_t unfinished_;
  int64_t output_bytes_ = 0;  // of all choices
  bool stream_started_ = false;
  bool over_ = false;                      // responded, failed or abandoned: later deltas are dropped
  std::atomic<int64_t> pending_bytes_{0};  // deltas posted but not yet processed
  std::atomic<bool> behind_{false};        // the limit was exceeded: no more deltas are posted
};

}  // namespace

HttpResponse ApiFormat::refusal(const Status& status) const { return error_response(status); }

std::vector<json> ApiFormat::failure(const Status& status) { return {json::parse(error_body(status, ""))}; }

void LiveRequests::add(const std::string& id, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  reserved_.erase(name);
  live_.emplace(id, name);
}

void LiveRequests::done(const std::string& id, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  live_.erase(live_.find({id, name}));
  if (live_.empty()) none_.notify_all();
}

uint64_t LiveRequests::reserve(const std::string& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool is_live = std::any_of(live_.begin(), live_.end(),
                                   [&id](const auto& live) { return live.first == id || live.second == id; });
  return !is_live && reserved_.emplace(id, last_ticket_ + 1).second ? ++last_ticket_ : 0;
}

void LiveRequests::release(const std::string& id, uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto at = reserved_.find(id); at != reserved_.end() && at->second == ticket) reserved_.erase(at);
}

void LiveRequests::wait_for_none() {
  std::unique_lock<std::mutex> lock(mutex_);
  none_.wait(lock, [this] { return live_.empty(); });
}

std::vector<std::string> LiveRequests::of(const std::string& id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> found;
  for (const auto& [live, name] : live_)
    if (live == id || name == id) found.push_back(live);
  return found;
}

std::vector<std::string> LiveRequests::all() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> ids;
  for (const auto& [live, name] : live_) ids.push_back(live);
  return ids;
}

void run_generation(const GenerationContext& context, std::shared_ptr<HttpExchange> exchange,
                    GenerationCall call) {
  log_received(*context.config, exchange->request(), call);
  std::vector<Request> requests = std::move(call.requests);
  for (Request& request : requests) request.client = client_of(*context.config, *exchange);
  call.requests.resize(requests.size());  // Generation uses only their number
  const std::vector<PromptIds> prompts = std::move(call.prompts);
  std::make_shared<Generation>(context, std::move(exchange), std::move(call))
      ->start(std::move(requests), prompts);
}

}  // namespace fp4moe
