// HTTP/1.1 without its library: what the routes see of a connection.
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
  std::string path;           // without the query; never percent-decoded
  std::string query;          // behind the '?', as sent
  std::string host;           // "name:port": the Host header's, or that of a target in absolute form
  std::string authorization;  // these headers' values
  std::string api_key;        // x-api-key
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

// One request and its answer: respond(), or start_stream(), any write()s and finish().
// After the client has gone all of them do nothing.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  // Runs `task` after the handler, never at the same time as it or another task. From any thread. Tasks run
  // on the threads that serve all connections: long work is for run_long().
  virtual void post(std::function<void()> task) = 0;
  // From a posted task, as the last thing that it does: runs `task` like a posted one, but on a worker. What
  // is posted meanwhile waits.
  virtual void run_long(std::function<void()> task) = 0;
  // From the handler of a request with a body: counts `bytes` more, until the handler returns, into the
  // memory of requests (ServerConfig::max_buffered_bytes). False: they do not fit, and nothing is counted.
  virtual bool hold(int64_t bytes) = 0;

  // Only from the handler or from posted tasks:
  virtual const HttpRequest& request() const = 0;
  // The client's address without its port; of IPv6 the network, 64 bits. "unix" for a socket in the file
  // system, empty once the client has gone.
  virtual std::string peer() const = 0;
  virtual void respond(HttpResponse response) = 0;
  virtual void start_stream(const std::string& content_type) = 0;
  virtual void write(std::string bytes) = 0;
  virtual void finish() = 0;
  // Closes the connection, with a line in the log. The answer's rest is lost.
  virtual void drop(const std::string& reason) = 0;
  // `task` runs whenever nothing was sent for so many seconds, until the answer is whole; 0: never.
  virtual void on_quiet(double seconds, std::function<void()> task) = 0;
  // `task` runs if the client goes away (or falls too far behind) before the answer is whole.
  virtual void on_disconnect(std::function<void()> task) = 0;
};

// Handles a whole request: GET, HEAD and OPTIONS on the threads that serve all connections, where it must be
// short, other methods on a worker. The request's body is freed when it returns.
using HttpHandler = std::function<void(std::shared_ptr<HttpExchange>)>;
// Answers a request by its head alone, or returns nothing: then its body is read, and the handler is called.
using HttpGate = std::function<std::optional<HttpResponse>(const HttpRequest& head)>;
// Told of each answer's status as it is begun; the request is empty where it could not be read.
using AnswerHook = std::function<void(const HttpRequest& request, int status)>;

// Listens, parses and times out; refuses requests from foreign pages (server/origin.h), asks `gate` about
// each head, and calls `handler` for each whole request, one at a time per connection. What the handler
// throws is logged, and answered as an internal error.
class HttpServer {
 public:
  static Result<std::unique_ptr<HttpServer>> make(const ServerConfig& config, HttpHandler handler,
                                                  AnswerHook on_answer = {}, HttpGate gate = {});
  virtual ~HttpServer() = default;  // joins; no task may be posted any more
  virtual int port() const = 0;
  virtual int64_t open_connections() const = 0;
  virtual int64_t busy_exchanges() const = 0;  // requests whose answer is not yet handed to the system
  // Waits until there are none of these, at most until then.
  void wait_for_answers(std::chrono::steady_clock::time_point deadline) const;
  virtual int64_t buffered_bytes() const = 0;  // of requests that have not been handled yet
  // Closes the listener and every connection; returns when no handler runs any more.
  virtual void close_all() = 0;
};

}  // namespace fp4moe
