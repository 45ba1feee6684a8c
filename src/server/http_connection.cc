#include "server/http_connection.h"

#include <array>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/status.hpp>
#include <boost/beast/http/verb.hpp>
#include <cstdio>
#include <exception>

#include "server/cors.h"
#include "server/errors.h"

namespace fp4moe {
namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

constexpr size_t kPipelineBytes = 64 << 10;  // read ahead while a request is being answered
constexpr double kLingerSeconds = 2;

std::chrono::steady_clock::time_point seconds_from_now(double seconds) {
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(seconds));
}

HttpRequest to_request(http::request<http::string_body> message) {
  HttpRequest request;
  request.method = std::string(message.method_string());
  request.path = std::string(message.target());
  const size_t path_size = std::min(request.path.find('?'), request.path.size());
  if (path_size < request.path.size()) request.query = request.path.substr(path_size + 1);
  request.path.resize(path_size);
  request.authorization = std::string(message[http::field::authorization]);
  request.api_key = std::string(message["x-api-key"]);
  request.origin = std::string(message[http::field::origin]);
  request.access_control_request_headers = std::string(message[http::field::access_control_request_headers]);
  request.body = std::move(message.body());
  return request;
}

}  // namespace

Connection::Connection(Socket socket, ConnectionShared& shared)
    : socket_(std::move(socket)), shared_(shared), timer_(socket_.get_executor()) {
  shared_.open.fetch_add(1);
}

Connection::~Connection() { shared_.open.fetch_sub(1); }

void Connection::start() {
  asio::dispatch(socket_.get_executor(), [self = shared_from_this()] {
    boost::system::error_code ignored;
    self->socket_.non_blocking(true, ignored);
    self->socket_.set_option(asio::ip::tcp::no_delay(true), ignored);  // refused by unix sockets
    self->read_deadline_ = seconds_from_now(self->shared_.config.idle_timeout_seconds);
    self->read();
    self->tick();
  });
}

void Connection::shut_down() {
  post([this] { close(); });
}

void Connection::post(std::function<void()> task) {
  asio::post(socket_.get_executor(), [self = shared_from_this(), task = std::move(task)] { task(); });
}

void Connection::read() {
  if (reading_ || closed_ || (is_answering() && in_.size() >= kPipelineBytes)) return;
  reading_ = true;
  // Waits first, so that an idle connection holds no buffer.
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](boost::system::error_code error) {
    self->on_readable(error);
  });
}

void Connection::on_readable(boost::system::error_code error) {
  reading_ = false;
  if (closed_) return;
  thread_local std::array<char, 16 << 10> arriving;
  const size_t bytes = error ? 0 : socket_.read_some(asio::buffer(arriving), error);
  if (error == asio::error::would_block || error == asio::error::try_again) return read();
  // End of input is taken for a disconnect even where the client only shut its sending side: nothing else
  // tells that nobody waits for the answer. What is already on its way to the client is still sent.
  if (error && (busy_ || unsent_bytes_ == 0)) return close();
  if (error) {
    close_when_sent_ = true;
    return;
  }
  if (lingering_) return read();
  in_.commit(asio::buffer_copy(in_.prepare(bytes), asio::buffer(arriving, bytes)));
  parse();
  read();
}

void Connection::parse() {
  while (!is_answering() && !closed_ && !close_when_sent_ && in_.size() > 0) {
    if (!parser_) {
      parser_.emplace();
      parser_->eager(true);
      parser_->header_limit(static_cast<uint32_t>(shared_.config.max_header_bytes));
      parser_->body_limit(static_cast<uint64_t>(shared_.config.max_body_bytes));
      read_deadline_ = seconds_from_now(shared_.config.request_timeout_seconds);
      look_in(looks_apart());
    }
    const bool header_was_done = parser_->is_header_done();
    boost::system::error_code error;
    const size_t used = parser_->put(in_.data(), error);
    in_.consume(used);
    if (error && error != http::error::need_more) return refuse(error);
    if (parser_->is_done()) return dispatch();
    if (!header_was_done && parser_->is_header_done() &&
        beast::iequals(parser_->get()[http::field::expect], "100-continue")) {
      send("HTTP/1.1 100 Continue\r\n\r\n");
    }
    if (used == 0) return;
  }
}

void Connection::refuse(boost::system::error_code error) {
  int status = 400;
  std::string problem = "malformed HTTP request: " + error.message();
  if (error == http::error::body_limit) {
    status = 413;
    problem = "the body has more than the legal " + std::to_string(shared_.config.max_body_bytes) + " bytes";
  } else if (error == http::error::header_limit) {
    status = 431;
    problem =
        "the header has more than the legal " + std::to_string(shared_.config.max_header_bytes) + " bytes";
  }
  parser_.reset();
  busy_ = true;
  count_busy();
  keep_alive_ = false;
  streaming_ = false;
  request_ = {};
  HttpResponse response = error_response(invalid_argument(problem));
  response.status = status;
  respond(std::move(response));
}

void Connection::dispatch() {
  keep_alive_ = parser_->get().keep_alive();
  http11_ = parser_->get().version() >= 11;
  request_ = to_request(parser_->release());
  parser_.reset();
  streaming_ = false;
  on_disconnect_ = on_quiet_ = nullptr;
  busy_ = true;
  count_busy();
  try {
    shared_.handler(shared_from_this());
  } catch (const std::exception& error) {  // out of memory, or a mistake of ours
    shared_.log(LogLevel::kError, "request failed: " + request_.path + ": " + error.what());
    respond(error_response(internal_error(error.what())));
  }
}

void Connection::count_busy() {
  const bool now = !closed_ && is_answering();
  if (now != counted_busy_) shared_.busy.fetch_add(now ? 1 : -1);
  counted_busy_ = now;
}

std::string Connection::header(int status, const std::string& content_type) const {
  const std::string reason(http::obsolete_reason(static_cast<http::status>(status)));
  return "HTTP/1.1 " + std::to_string(status) + " " + reason + "\r\nContent-Type: " + content_type +
         "\r\nConnection: " + (keep_alive_ ? "keep-alive" : "close") + "\r\n" +
         cors_headers(shared_.config, request_);
}

void Connection::tell_answer(int status) {
  if (shared_.on_answer) shared_.on_answer(request_, status);
}

void Connection::respond(HttpResponse response) {
  if (closed_ || !busy_) return;
  tell_answer(response.status);
  send(header(response.status, response.content_type) + response.extra_headers + "Content-Length: " +
       std::to_string(response.body.size()) + "\r\n\r\n" + (request_.method == "HEAD" ? "" : response.body));
  finish();
}

void Connection::start_stream(const std::string& content_type) {
  if (closed_ || !busy_) return;
  tell_answer(200);
  streaming_ = true;
  chunked_ = http11_;
  if (!chunked_) keep_alive_ = false;
  send(header(200, content_type) + "Cache-Control: no-cache\r\n" +
       (chunked_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n"));
}

void Connection::write(std::string bytes) {
  if (closed_ || !busy_ || bytes.empty()) return;
  if (unsent_bytes_ > static_cast<size_t>(shared_.config.max_unsent_bytes)) {
    return drop("the client is behind by more than max_unsent_bytes=" +
                std::to_string(shared_.config.max_unsent_bytes));
  }
  if (!chunked_) return send(std::move(bytes));
  char size[32];
  std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
  send(size + bytes + "\r\n");
}

void Connection::finish() {
  if (closed_ || !busy_) return;
  if (streaming_ && chunked_) send("0\r\n\r\n");
  if (closed_) return;
  on_disconnect_ = on_quiet_ = nullptr;
  busy_ = false;
  count_busy();
  if (!keep_alive_) close_when_sent_ = true;
  read_deadline_ = seconds_from_now(shared_.config.idle_timeout_seconds);
  request_.body = std::string();
  if (in_.size() == 0) in_.shrink_to_fit();
  // Not at once: a handler that answers synchronously is still inside parse().
  post([this] { proceed(); });
}

// Goes on after an answer, once it is both made and sent.
void Connection::proceed() {
  if (is_answering()) return;
  if (close_when_sent_) return linger();
  parse();
  read();
}

void Connection::drop(const std::string& reason) {
  if (closed_) return;
  shared_.log(LogLevel::kWarning, "dropped a client of " + request_.path + ": " + reason);
  close();
}

void Connection::on_quiet(double seconds, std::function<void()> task) {
  if (!busy_ || seconds <= 0) return;
  on_quiet_ = std::move(task);
  quiet_seconds_ = seconds;
  quiet_since_ = Clock::now();
  look_in(looks_apart());
}

void Connection::send(std::string bytes) {
  if (closed_) return;
  quiet_since_ = Clock::now();
  unsent_bytes_ += bytes.size();
  out_.push_back(std::move(bytes));
  count_busy();
  flush();
}

void Connection::flush() {
  if (!writing_.empty() || out_.empty()) return;
  writing_.assign(std::make_move_iterator(out_.begin()), std::make_move_iterator(out_.end()));
  out_.clear();
  std::vector<asio::const_buffer> buffers;
  buffers.reserve(writing_.size());
  for (const std::string& bytes : writing_) buffers.push_back(asio::buffer(bytes));
  write_deadline_ = seconds_from_now(shared_.config.write_timeout_seconds);
  asio::async_write(socket_, buffers, [self = shared_from_this()](boost::system::error_code error, size_t) {
    self->on_written(error);
  });
}

void Connection::on_written(boost::system::error_code error) {
  for (const std::string& bytes : writing_) unsent_bytes_ -= bytes.size();
  writing_.clear();
  if (closed_) return;
  if (error) return close();
  flush();
  count_busy();
  proceed();
}

// Closing a socket with unread input makes the system throw away what the client has not read yet.
void Connection::linger() {
  if (lingering_ || closed_) return;
  boost::system::error_code ignored;
  socket_.shutdown(Socket::shutdown_send, ignored);
  lingering_ = true;
  in_.clear();
  read_deadline_ = seconds_from_now(kLingerSeconds);
  read();
}

void Connection::tick() {
  if (closed_) return;
  const Clock::time_point now = Clock::now();
  if (!writing_.empty() && now > write_deadline_) {
    return drop("it took nothing for write_timeout_seconds=" +
                std::to_string(shared_.config.write_timeout_seconds));
  }
  if (!busy_ && writing_.empty() && now > read_deadline_) return close();
  if (on_quiet_ && writing_.empty() && now - quiet_since_ >= std::chrono::duration<double>(quiet_seconds_))
    on_quiet_();
  // An idle connection is looked at ever more often towards its end; parse() sees to it when a request
  // begins.
  const bool is_idle = !busy_ && writing_.empty() && !parser_;
  look_in(is_idle ? std::max(looks_apart(), std::chrono::duration<double>(read_deadline_ - now).count() / 4)
                  : looks_apart());
}

// Seconds, by the nearest deadline that there may be.
double Connection::looks_apart() const {
  const ServerConfig& c = shared_.config;
  const double nearest =
      std::min({c.idle_timeout_seconds, c.request_timeout_seconds, c.write_timeout_seconds, 4.0});
  return (on_quiet_ ? std::min(nearest, quiet_seconds_) : nearest) / 4;
}

// The next look is then, and none before.
void Connection::look_in(double seconds) {
  timer_.expires_at(seconds_from_now(seconds));
  timer_.async_wait([self = shared_from_this()](boost::system::error_code error) {
    if (!error) self->tick();
  });
}

void Connection::close() {
  if (closed_) return;
  closed_ = true;
  busy_ = false;
  count_busy();
  boost::system::error_code ignored;
  socket_.close(ignored);
  timer_.cancel();
  on_quiet_ = nullptr;
  if (on_disconnect_) std::exchange(on_disconnect_, nullptr)();
}

}  // namespace fp4moe
