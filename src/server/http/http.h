// HTTP/1.1 as the routes see it, independent of the HTTP library.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "fp4moe/server.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct HttpRequest {
  std::string method;         // as sent, such as "POST"
  std::string path;           // without the query; never percent-decoded (server/http/route_path.h)
  std::string query;          // after the '?', as sent
  std::string host;           // "name:port" from the Host header or from an absolute target
  std::string authorization;  // the values of these headers
  std::string api_key;        // x-api-key
  std::string request_id;     // x-request-id, if it is a legal id (server/http/request_id.h)
  std::string origin;
  std::string access_control_request_headers;
  std::string body;
};

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  std::string extra_headers;  // whole lines, each ending in CRLF
};

// Returns the time after `seconds`: after 1e8 at most, also for infinity, and after 0 for NaN and negative
// numbers.
std::chrono::steady_clock::time_point deadline_in(double seconds);

// A probe's response: a 200 loses its body; errors keep theirs.
inline HttpResponse without_body(HttpResponse response) {
  return response.status == 200 ? HttpResponse{.body = "", .content_type = "text/plain"} : response;
}

// One request and its response: respond(), or start_stream(), any number of write()s and finish(). After the
// client has disconnected, all of these do nothing.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  // Runs `task` after the handler, never concurrently with it or another task. Callable from any thread.
  // Tasks run on the I/O threads, which serve all connections; use run_long() for long work.
  virtual void post(std::function<void()> task) = 0;
  // Runs `task` like a posted one, but on a worker; tasks posted meanwhile wait. Call it only as the last
  // action of a posted task.
  virtual void run_long(std::function<void()> task) = 0;
  // Only from the handler of a request with a body: charges `bytes` more to the request memory
  // (ServerConfig::max_buffered_bytes) until the handler returns. False: it does not fit, and nothing is
  // charged.
  virtual bool hold(int64_t bytes) = 0;

  // Only from the handler or from posted tasks:
  virtual const HttpRequest& request() const = 0;
  // The client's address without its port; for IPv6 the /64 network. "unix" for a Unix socket, empty after
  // the client has disconnected.
  virtual std::string peer() const = 0;
  // Adds whole header lines to the response, instead of those of an earlier call.
  virtual void set_headers(std::string lines) = 0;
  virtual void respond(HttpResponse response) = 0;
  virtual void start_stream(const std::string& content_type) = 0;
  virtual void write(std::string bytes) = 0;
  virtual void finish() = 0;
  virtual int64_t unsent_bytes() const = 0;  // written, but not taken by the client's socket yet
  // Runs `task` each time the socket has taken everything written, until the response is complete.
  virtual void on_sent(std::function<void()> task) = 0;
  // Logs the reason and closes the connection; the rest of the response is lost.
  virtual void drop(const std::string& reason) = 0;
  // Runs `task` each time nothing was sent for `seconds`, until the response is complete; 0: never.
  virtual void on_quiet(double seconds, std::function<void()> task) = 0;
  // Runs `task` if the client disconnects (or falls too far behind) before the response is complete.
  virtual void on_disconnect(std::function<void()> task) = 0;
};

// Handles a complete request: GET, HEAD and OPTIONS on the I/O threads, where it must return quickly, other
// methods on a worker. The request's body is freed when it returns.
using HttpHandler = std::function<void(std::shared_ptr<HttpExchange>)>;
// Responds to a request from its head alone, or returns nothing to have the body read and the handler called.
using HttpGate = std::function<std::optional<HttpResponse>(const HttpRequest& head)>;
// Called with each response's status when the response starts; `request` is empty if it could not be parsed.
using ResponseHook = std::function<void(const HttpRequest& request, int status)>;
// Returns an error response of the HTTP server itself in the shape that the request's API uses; `head` is
// empty if it could not be read.
using ErrorShaper = std::function<HttpResponse(const HttpRequest& head, HttpResponse error)>;

// Listens, parses and enforces timeouts; refuses requests from foreign pages (server/http/origin.h), passes
// each head to `gate`, and calls `handler` for each complete request, one at a time per connection.
// Exceptions from the handler are logged and become an internal error.
class HttpServer {
 public:
  static Result<std::unique_ptr<HttpServer>> make(const ServerConfig& config, HttpHandler handler,
                                                  ResponseHook on_response = {}, HttpGate gate = {},
                                                  ErrorShaper shape = {});
  virtual ~HttpServer() = default;  // joins the threads; nothing may post() any more
  virtual int port() const = 0;
  virtual int64_t open_connections() const = 0;
  virtual int64_t busy_exchanges() const = 0;  // requests whose response is not completely sent
  // Waits until busy_exchanges() is 0 or the deadline has passed.
  void wait_for_responses(std::chrono::steady_clock::time_point deadline) const;
  virtual int64_t buffered_bytes() const = 0;  // memory of requests that have not been handled yet
  // Closes the listener and every connection; returns once no handler runs on a worker.
  virtual void close_all() = 0;
};

}  // namespace fp4moe
