// How a connection reads requests: the head is checked before the body is read, and memory grows only as
// bytes arrive.
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/http/error.hpp>
#include <exception>
#include <new>
#include <string_view>
#include <vector>

#include "server/http/errors.h"
#include "server/http/http_connection.h"
#include "server/http/origin.h"
#include "server/http/request_head.h"

namespace fp4moe {
namespace asio = boost::asio;
namespace http = boost::beast::http;

namespace {

constexpr size_t kHeadReadBytes = 16 << 10, kBodyReadBytes = 256 << 10;  // at a time
constexpr size_t kPipelineBytes = 64 << 10;   // read ahead while a response is pending
constexpr size_t kSmallBodyBytes = 64 << 10;  // small tasks don't wait for larger ones
constexpr size_t kMaxHeadLines = 256;
constexpr size_t kHeadLineBytes = 96;     // memory per header line in addition to its text
constexpr size_t kUncountedBytes = 4096;  // per connection: small requests always fit

size_t count_lines(std::string_view head) {
  return static_cast<size_t>(std::count(head.begin(), head.end(), '\n'));
}

// Handled on the I/O thread (see HttpHandler).
bool is_short(const HttpRequest& request) {
  return request.method == "GET" || request.method == "HEAD" || request.method == "OPTIONS";
}

std::string too_large(int64_t limit) { return "the body has more than " + std::to_string(limit) + " bytes"; }

}  // namespace

void Connection::read() {
  if (lent_ || reading_ || closed_ || (is_responding() && in_.size() >= kPipelineBytes)) return;
  reading_ = true;
  if (waits_for_pace()) return;
  // Wait for readability first, so that an idle connection holds no buffer.
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](boost::system::error_code error) {
    self->run([connection = self.get(), error] { connection->on_readable(error); });
  });
}

// A large body is received at the pace that all connections share.
bool Connection::waits_for_pace() {
  if (next_read_ <= Clock::now()) return false;
  pace_timer_.expires_at(next_read_);
  pace_timer_.async_wait([self = shared_from_this()](boost::system::error_code) {
    self->run([connection = self.get()] {
      connection->reading_ = false;
      connection->read();
    });
  });
  return true;
}

void Connection::on_readable(boost::system::error_code error) {
  reading_ = false;
  if (closed_) return;
  thread_local std::vector<char> arriving(kBodyReadBytes);
  const bool in_body = lingering_ || (parser_ && parser_->is_header_done());
  const auto buffer = asio::buffer(arriving, in_body ? kBodyReadBytes : kHeadReadBytes);
  // On TCP, MSG_TRUNC discards input without copying it; on other sockets it has no effect.
  const size_t bytes = error ? 0 : socket_.receive(buffer, lingering_ ? MSG_TRUNC : 0, error);
  if (error == asio::error::would_block || error == asio::error::try_again) return read();
  // End of input counts as a disconnect even if the client only shut down its send side, because nothing else
  // shows that the client is gone. Data already on its way to the client is still sent.
  if (error && (busy_ || unsent_bytes_ == 0)) return close();
  if (error) {
    close_when_sent_ = true;
    return;
  }
  if (lingering_ || (in_body && parser_->get().body().size() > kSmallBodyBytes))
    next_read_ = shared_.pace.take(bytes, Clock::now());
  if (lingering_) return read();
  try {
    in_.commit(asio::buffer_copy(in_.prepare(bytes), asio::buffer(arriving, bytes)));
    parse();
  } catch (const std::bad_alloc&) {
    refuse_for_memory();
  }
  read();
}

void Connection::parse() {
  while (!lent_ && !is_responding() && !closed_ && !close_when_sent_ && in_.size() > 0 && parse_some()) {
  }
  if (lent_ || closed_) return;
  if (in_.size() == 0) in_.shrink_to_fit();
  const size_t body = parser_ ? parser_->get().body().capacity() : request_.body.capacity();
  if (!account(body) && parser_) refuse_for_memory();
}

// Skips empty lines before a request line (RFC 9112, section 2.2). Returns whether a request line may follow
// in in_.
bool Connection::skip_empty_lines() {
  const auto input = [this] {
    return std::string_view(static_cast<const char*>(in_.data().data()), in_.size());
  };
  while (input().starts_with("\r\n")) in_.consume(2);
  return !input().empty() && input() != "\r";
}

// Returns whether there may be more to parse.
bool Connection::parse_some() {
  if (!parser_ && !skip_empty_lines()) return false;
  if (!parser_) {
    parser_.emplace();
    parser_->header_limit(static_cast<uint32_t>(shared_.config.max_header_bytes));
    parser_->body_limit(boost::none);  // set after the head is checked
    head_bytes_ = head_lines_ = 0;
    request_ = {};
    read_deadline_ = seconds_from_now(shared_.config.request_timeout_seconds);
    look_in(looks_apart());
  }
  const bool is_head = !parser_->is_header_done();
  if (!is_head && !make_room_for_body()) return refuse_for_memory(), false;
  boost::system::error_code error;
  const size_t used = parser_->put(in_.data(), error);
  if (error && error != http::error::need_more) return refuse_parse(error), false;
  if (is_head) {
    const std::string_view head(static_cast<const char*>(in_.data().data()), used);
    if (has_folded_line(head)) return refuse(400, "a header line is continued on the next line"), false;
    head_bytes_ += used;
    head_lines_ += count_lines(head);
    if (head_lines_ > kMaxHeadLines)
      return refuse(431, "the header has more than " + std::to_string(kMaxHeadLines) + " lines"), false;
  }
  in_.consume(used);
  if (is_head && parser_->is_header_done() && !take_head()) return false;
  if (parser_->is_done()) return dispatch(), false;
  if (used == 0 && in_.size() > static_cast<size_t>(shared_.config.max_header_bytes))
    return refuse(400, "a chunk has a head or trailer of more than max_header_bytes=" +
                           std::to_string(shared_.config.max_header_bytes) + " bytes"),
           false;
  return used > 0;
}

// Checks the complete head; returns whether to read the body.
bool Connection::take_head() {
  keep_alive_ = parser_->get().keep_alive();
  http11_ = parser_->get().version() >= 11;
  Result<RequestHead> head = read_head(parser_->get());
  if (!head.ok())
    return refuse(head.status().code() == StatusCode::kUnsupported ? 417 : 400, head.status().message()),
           false;
  request_ = std::move(head->request);
  content_length_ = head->content_length;
  std::optional<HttpResponse> response = refuse_foreign(shared_.config, shared_.is_loopback, request_);
  if (response) response = shaped(std::move(*response));
  if (!response && shared_.gate) response = shared_.gate(request_);
  const auto refuse_body = [&](int status, const Status& why) {
    response = error_response(why);
    response->status = status;
    response = shaped(std::move(*response));
  };
  if (!response && head->has_body() && !head->content_encoding.empty())
    refuse_body(415, unsupported("Content-Encoding: " + head->content_encoding +
                                 " is not supported; send the body without an encoding"));
  if (!response && content_length_.value_or(0) > static_cast<uint64_t>(shared_.config.max_body_bytes))
    refuse_body(413, invalid_argument(too_large(shared_.config.max_body_bytes)));
  if (response) return respond_to_head(std::move(*response)), false;
  parser_->body_limit(static_cast<uint64_t>(shared_.config.max_body_bytes));
  parser_->eager(true);
  if (head->expects_continue && head->has_body() && in_.size() == 0) send("HTTP/1.1 100 Continue\r\n\r\n");
  return true;
}

// Reserves memory for the body and the bytes in in_. If the capacity must grow, it at least doubles, up to
// the announced length or, without one, the allowed maximum. False: over the memory budget.
bool Connection::make_room_for_body() {
  std::string& body = parser_->get().body();
  const size_t needed = body.size() + in_.size();
  if (needed <= body.capacity()) return true;
  const size_t most = content_length_.value_or(static_cast<uint64_t>(shared_.config.max_body_bytes));
  const size_t capacity = std::min(std::max(needed, 2 * body.capacity()), most);
  if (capacity <= body.capacity()) return true;
  if (!account(capacity)) return false;
  std::string grown;
  grown.reserve(capacity);  // reserve() on the longer string would at least double its capacity
  grown += body;
  body.swap(grown);
  return true;
}

// An error of this file in the shape of the request's API.
HttpResponse Connection::shaped(HttpResponse error) const {
  return shared_.shape ? shared_.shape(request_, std::move(error)) : error;
}

// Responds from the head alone. Keeps the connection open if there is no body or if all of it can be skipped
// in in_.
void Connection::respond_to_head(HttpResponse response) {
  bool is_whole = parser_->is_done();
  if (!is_whole && content_length_.value_or(UINT64_MAX) <= in_.size()) {
    in_.consume(*content_length_);
    is_whole = true;
  }
  if (!is_whole) keep_alive_ = false;
  begin_response();
  respond(std::move(response));
}

void Connection::respond_and_close(HttpResponse response) {
  keep_alive_ = false;
  begin_response();
  respond(std::move(response));
}

void Connection::refuse(int status, const std::string& problem) {
  HttpResponse response = error_response(invalid_argument(problem));
  response.status = status;
  response = shaped(std::move(response));
  request_ = {};
  respond_and_close(std::move(response));
}

void Connection::refuse_parse(boost::system::error_code error) {
  const ServerConfig& config = shared_.config;
  if (error == http::error::body_limit) return refuse(413, too_large(config.max_body_bytes));
  if (error == http::error::header_limit)
    return refuse(431, "the header has more than " + std::to_string(config.max_header_bytes) + " bytes");
  refuse(400, "malformed HTTP request: " + error.message());
}

void Connection::refuse_for_memory() {
  if (closed_ || busy_) return;
  in_.clear();
  in_.shrink_to_fit();
  respond_and_close(shaped(error_response(unavailable(
      "incoming requests hold more than max_buffered_bytes=" + std::to_string(shared_.memory.limit()) +
      " in memory, and this one is the largest"))));
}

void Connection::give_way() {
  std::shared_ptr<Connection> self = weak_from_this().lock();
  if (self == nullptr) return;
  const auto executor = socket_.get_executor();
  // Move `self`: destroying the last reference here would take the lock that the caller holds.
  asio::post(executor, [self = std::move(self)] {
    self->run([connection = self.get()] {
      if (connection->parser_) connection->refuse_for_memory();
    });
  });
}

void Connection::begin_response() {
  parser_.reset();
  streaming_ = false;
  on_disconnect_ = on_quiet_ = nullptr;
  busy_ = true;
  count_busy();
  if (in_.size() == 0) in_.shrink_to_fit();
  account(request_.body.capacity());
}

void Connection::dispatch() {
  request_.body = std::move(parser_->get().body());
  begin_response();
  if (is_short(request_)) return handle();
  const bool is_small = request_.body.size() <= kSmallBodyBytes;
  if (!is_small && shared_.queued_bytes.load() > shared_.memory.limit() / 4) {
    respond(
        shaped(error_response(unavailable("requests that wait for a worker hold more than a quarter of "
                                          "max_buffered_bytes=" +
                                          std::to_string(shared_.memory.limit())))));
    return forget_body();
  }
  queued_bytes_ = is_small ? 0 : static_cast<int64_t>(request_.body.size());
  shared_.queued_bytes.fetch_add(queued_bytes_);
  lend([this] { handle(); }, is_small);
}

void Connection::handle() {
  try {
    shared_.handler(shared_from_this());
  } catch (const std::exception& error) {  // out of memory, or a bug here
    shared_.log(LogLevel::kError, "request failed: " + request_.path.substr(0, 200) + ": " + error.what());
    respond(shaped(error_response(internal_error(error.what()))));
  }
  forget_body();
}

void Connection::forget_body() {
  std::string().swap(request_.body);
  held_bytes_ = 0;
  head_bytes_ = head_lines_ = 0;
  account(0);
}

bool Connection::hold(int64_t bytes) {
  held_bytes_ += bytes;
  if (account(request_.body.capacity())) return true;
  held_bytes_ -= bytes;
  return false;
}

// Charges the request's memory to the shared budget. False: it does not fit.
bool Connection::account(size_t body_capacity) {
  const size_t bytes = in_.capacity() + 2 * head_bytes_ + kHeadLineBytes * head_lines_ + body_capacity +
                       static_cast<size_t>(held_bytes_);
  const size_t counted = bytes > kUncountedBytes ? bytes - kUncountedBytes : 0;
  if (counted == 0 && !is_accounted_) return true;
  const bool fits = shared_.memory.set(*this, static_cast<int64_t>(counted), parser_.has_value());
  is_accounted_ = counted > 0;
  return fits;
}

}  // namespace fp4moe
