#include "server/http/http_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/status.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <utility>

#include "server/http/cors.h"

namespace fp4moe {
namespace asio = boost::asio;
namespace http = boost::beast::http;

namespace {

constexpr double kLingerSeconds = 2;

// RFC 9110, section 5.6.7: "Sun, 06 Nov 1994 08:49:37 GMT", in any locale.
std::string http_date(std::time_t seconds) {
  static constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  static constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                            "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  std::tm t = {};
  ::gmtime_r(&seconds, &t);
  char text[64];
  std::snprintf(text, sizeof text, "%s, %02d %s %04d %02d:%02d:%02d GMT", kDays[t.tm_wday], t.tm_mday,
                kMonths[t.tm_mon], t.tm_year + 1900, t.tm_hour, t.tm_min, t.tm_sec);
  return text;
}

}  // namespace

Connection::Connection(Socket socket, ConnectionShared& shared)
    : socket_(std::move(socket)),
      shared_(shared),
      timer_(socket_.get_executor()),
      pace_timer_(socket_.get_executor()) {
  shared_.open.fetch_add(1);
}

Connection::~Connection() {
  if (is_accounted_) shared_.memory.set(*this, 0, false);
  shared_.open.fetch_sub(1);
}

void Connection::start() {
  asio::dispatch(socket_.get_executor(), [self = shared_from_this()] {
    boost::system::error_code ignored;
    self->socket_.non_blocking(true, ignored);
    self->socket_.set_option(asio::ip::tcp::no_delay(true), ignored);  // fails on Unix sockets
    self->read_deadline_ = seconds_from_now(self->shared_.config.idle_timeout_seconds);
    self->read();
    self->tick();
  });
}

std::string Connection::peer() const {
  boost::system::error_code error;
  const auto remote = socket_.remote_endpoint(error);
  if (error) return "";
  if (remote.protocol().family() == AF_UNIX) return "unix";
  asio::ip::tcp::endpoint endpoint;
  if (remote.size() > endpoint.capacity()) return "";
  endpoint.resize(remote.size());
  std::memcpy(endpoint.data(), remote.data(), remote.size());
  asio::ip::address address = endpoint.address();
  if (address.is_v4()) return address.to_string();
  if (address.to_v6().is_v4_mapped())
    return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()).to_string();
  auto bytes = address.to_v6().to_bytes();
  std::fill(bytes.begin() + 8, bytes.end(), static_cast<unsigned char>(0));
  return asio::ip::make_address_v6(bytes).to_string() + "/64";
}

void Connection::shut_down() {
  post([this] { close(); });
}

void Connection::post(std::function<void()> task) {
  asio::post(socket_.get_executor(),
             [self = shared_from_this(), task = std::move(task)]() mutable { self->run(std::move(task)); });
}

// Runs `task` on the strand; defers it while the connection is lent.
void Connection::run(std::function<void()> task) {
  if (lent_) return deferred_.push_back(std::move(task));
  task();
}

void Connection::lend(std::function<void()> task, bool is_small) {
  lent_ = true;
  const bool is_queued = shared_.workers.add(
      [self = shared_from_this(), task = std::move(task)] {
        self->work(task);
        asio::post(self->socket_.get_executor(), [self] { self->take_back(); });
      },
      is_small);
  if (is_queued) return;  // a worker may already have returned the connection
  lent_ = false;
  shared_.queued_bytes.fetch_sub(std::exchange(queued_bytes_, 0));
  close();
}

// Called on a worker.
void Connection::work(const std::function<void()>& task) {
  shared_.queued_bytes.fetch_sub(std::exchange(queued_bytes_, 0));
  if (is_abandoned()) return close();
  try {
    task();
  } catch (const std::exception& error) {  // out of memory, or a bug here
    drop(std::string("its response could not be written: ") + error.what());
  }
}

void Connection::take_back() {
  lent_ = false;
  while (!lent_ && !deferred_.empty()) {
    const std::function<void()> task = std::move(deferred_.front());
    deferred_.pop_front();
    task();
  }
  read();
}

// Whether the client has disconnected. Reads, which would detect this, are deferred while a worker has the
// connection.
bool Connection::is_abandoned() {
  char byte;
  const ssize_t received = closed_ ? 0 : ::recv(socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  const bool is_open = received > 0 || (received < 0 && (errno == EAGAIN || errno == EINTR));
  return shared_.stopping.load() || !is_open;
}

void Connection::count_busy() {
  const bool now = !closed_ && is_responding();
  if (now != counted_busy_) shared_.busy.fetch_add(now ? 1 : -1);
  counted_busy_ = now;
}

std::string Connection::header(int status, const std::string& content_type) const {
  const std::string reason(http::obsolete_reason(static_cast<http::status>(status)));
  return "HTTP/1.1 " + std::to_string(status) + " " + reason + "\r\nContent-Type: " + content_type +
         "\r\nDate: " + http_date(std::time(nullptr)) +
         "\r\nConnection: " + (keep_alive_ ? "keep-alive" : "close") + "\r\n" +
         cors_headers(shared_.config, request_) + more_headers_;
}

void Connection::report_response(int status) {
  if (shared_.on_response) shared_.on_response(request_, status);
}

void Connection::respond(HttpResponse response) {
  if (closed_ || !busy_) return;
  report_response(response.status);
  send(header(response.status, response.content_type) + response.extra_headers + "Content-Length: " +
       std::to_string(response.body.size()) + "\r\n\r\n" + (request_.method == "HEAD" ? "" : response.body));
  finish();
}

void Connection::start_stream(const std::string& content_type) {
  if (closed_ || !busy_) return;
  report_response(200);
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
  on_disconnect_ = on_quiet_ = on_sent_ = nullptr;
  more_headers_.clear();
  busy_ = false;
  count_busy();
  if (!keep_alive_) close_when_sent_ = true;
  read_deadline_ = seconds_from_now(shared_.config.idle_timeout_seconds);
  request_.body = std::string();
  if (in_.size() == 0) in_.shrink_to_fit();
  // Deferred: a handler that responds synchronously is still inside parse().
  post([this] { proceed(); });
}

// Continues with the next request once the response is complete and sent.
void Connection::proceed() {
  if (is_responding()) return;
  if (close_when_sent_) return linger();
  parse();
  read();
}

void Connection::drop(const std::string& reason) {
  if (closed_) return;
  shared_.log(LogLevel::kWarning, "dropped a client of " + request_.path.substr(0, 200) + ": " + reason);
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
    self->run([connection = self.get(), error] { connection->on_written(error); });
  });
}

void Connection::on_written(boost::system::error_code error) {
  for (const std::string& bytes : writing_) unsent_bytes_ -= bytes.size();
  writing_.clear();
  if (closed_) return;
  if (error) return close();
  flush();
  count_busy();
  if (unsent_bytes_ == 0)
    if (const std::function<void()> task = on_sent_) task();  // a copy: it may end the response
  proceed();
}

// Closing a socket with unread input makes the kernel discard sent data that the client has not read yet.
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
    return drop("the client read nothing for write_timeout_seconds=" +
                std::to_string(shared_.config.write_timeout_seconds));
  }
  if (!busy_ && writing_.empty() && now > read_deadline_) return close();
  if (on_quiet_ && writing_.empty() && now - quiet_since_ >= std::chrono::duration<double>(quiet_seconds_))
    on_quiet_();
  // An idle connection is checked at shrinking intervals towards its deadline; parse_some() restarts the
  // timer when a request begins.
  const bool is_idle = !busy_ && writing_.empty() && !parser_;
  look_in(is_idle ? std::max(looks_apart(), std::chrono::duration<double>(read_deadline_ - now).count() / 4)
                  : looks_apart());
}

// The tick interval in seconds: a quarter of the shortest timeout.
double Connection::looks_apart() const {
  const ServerConfig& c = shared_.config;
  const double nearest =
      std::min({c.idle_timeout_seconds, c.request_timeout_seconds, c.write_timeout_seconds, 4.0});
  return (on_quiet_ ? std::min(nearest, quiet_seconds_) : nearest) / 4;
}

// Schedules the next tick and cancels the pending one.
void Connection::look_in(double seconds) {
  timer_.expires_at(seconds_from_now(seconds));
  timer_.async_wait([self = shared_from_this()](boost::system::error_code error) {
    if (!error) self->run([connection = self.get()] { connection->tick(); });
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
  pace_timer_.cancel();
  parser_.reset();
  in_.clear();
  account(request_.body.capacity());
  on_quiet_ = nullptr;
  if (on_disconnect_) std::exchange(on_disconnect_, nullptr)();
  on_sent_ = nullptr;
}

}  // namespace fp4moe
