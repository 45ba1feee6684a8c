// Server: the HTTP front end of an Engine: OpenAI's and SGLang's routes, metrics and health.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "fp4moe/sinks.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Large because each server flag is a field.
struct ServerConfig {
  std::string host = "127.0.0.1";  // or "unix:/path": a Unix socket without a port
  int port = 30000;                // 0: any free port
  int unix_socket_mode = 0660;     // file mode of the Unix socket; default: owner and group may connect
  // Origins whose pages may send requests ("https://chat.example.org"; "*": all); default: same-origin only.
  // Other pages get 403.
  std::vector<std::string> cors_allow_origins;
  // Host header values accepted in addition to localhost, loopback addresses and `host`; "*": any. If this
  // list is empty, the header is checked only if `host` is a loopback address.
  std::vector<std::string> allowed_hosts;
  // Accepted keys ("Authorization: Bearer KEY" or "x-api-key: KEY") on all routes except /health, /ping,
  // /metrics and the chat page; empty: no check.
  std::vector<std::string> api_keys;
  // Keys for operator routes instead of api_keys; empty: api_keys are valid there too.
  std::vector<std::string> admin_api_keys;
  std::string metrics_prefix = "sglang:";  // of all metric names
  // Threads that parse requests and serialise large responses, 2 to 256; 0: a quarter of the cores, 2 to 8.
  int http_threads = 0;
  int64_t max_body_bytes = 32 << 20;    // of one request
  int64_t max_header_bytes = 64 << 10;  // of one request
  // Limit in bytes on the received data and parsed JSON of all requests that have not reached the engine yet.
  // If it is exceeded, the largest request that is still arriving gets 503. At least max_body_bytes.
  int64_t max_buffered_bytes = 192 << 20;
  // Limit in bytes on the text, tokens and log-probabilities of one request's outputs, which are kept until
  // it ends.
  int64_t max_output_bytes = 64 << 20;
  int64_t max_unsent_bytes = 8 << 20;   // per connection; a client that falls further behind is dropped
  int max_connections = 16384;          // open at the same time
  double idle_timeout_seconds = 75;     // between two requests on one connection
  double request_timeout_seconds = 30;  // from a request's first byte to its last
  double write_timeout_seconds = 30;    // during which the client accepts no bytes
  double keep_alive_seconds = 15;       // an idle stream gets an SSE comment after this time; 0: never
  int stream_interval = 1;              // output tokens per event of a stream, after the first
  // Memory of the stored responses of /v1/responses; the least recently used are evicted. 0: none are stored.
  int64_t max_stored_response_bytes = 64 << 20;
  bool strict_requests = false;        // refuse requests with unknown fields
  bool accept_any_model_name = false;  // requests may name any model; responses name the served one
  LogSink log_sink;                    // empty: log lines are dropped
  // Receives "request.received" and "request.finished" events with a JSON object of fields; empty: no events.
  std::function<void(const std::string& event, const std::string& fields)> request_sink;
  // 0: ids and sizes; 1: also sampling parameters; 2: also texts, cut to 2048 bytes; 3: whole texts
  int log_requests_level = 2;
};

// Serves from make() until stop() on its own threads: two for I/O and token delivery, and
// ServerConfig::http_threads workers. Probes (/health, /metrics) are served even if all workers are busy.
class Server {
 public:
  // Binds the address and listens on it. Until set_engine(), every route but the chat page returns 503.
  // kInvalidArgument (host, port, keys, origins, limits), kUnavailable (the port is in use).
  static Result<std::unique_ptr<Server>> make(ServerConfig config);
  virtual ~Server() = default;  // stops

  virtual int port() const = 0;
  // Called once. `engine` must outlive the server.
  virtual void set_engine(Engine& engine) = 0;
  // Answers new generation requests and /health with 503; returns when the running requests have finished, or
  // at the deadline, after aborting the rest. Infinity: no deadline.
  virtual void drain(double timeout_seconds) = 0;
  // Closes all connections, aborts their requests, and returns when the engine has ended all these requests.
  virtual void stop() = 0;
};

}  // namespace fp4moe
