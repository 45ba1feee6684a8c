// Server: the HTTP front of an Engine: OpenAI's and SGLang's routes, metrics and health.
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

struct ServerConfig {
  std::string host = "127.0.0.1";  // or "unix:/path": a socket in the file system, and no port
  int port = 30000;                // 0: any free port
  int unix_socket_mode = 0660;     // who may connect: its group too
  // Origins whose pages may ask ("https://chat.example.org"; "*": all); none: pages of this server alone.
  // Other pages get 403.
  std::vector<std::string> cors_allow_origins;
  // Hosts that requests may name, beside localhost, loopback addresses and `host`; "*": any. Checked where
  // this is not empty or `host` is a loopback address; never on a Unix socket while it is empty.
  std::vector<std::string> allowed_hosts;
  // "Authorization: Bearer KEY" on all routes but /health and /metrics; none: no check.
  std::vector<std::string> api_keys;
  // For the routes of operators, in place of api_keys; none: api_keys are for those too.
  std::vector<std::string> admin_api_keys;
  std::string metrics_prefix = "sglang:";
  // Threads that parse requests and print large answers, 2 to 256; 0: a quarter of the cores, 2 to 8.
  int http_threads = 0;
  int64_t max_body_bytes = 32 << 20;
  int64_t max_header_bytes = 64 << 10;
  // Of all requests that have not been handed to the engine yet: what was received of them and their parsed
  // JSON. Beyond it the largest request that is still arriving gets 503.
  int64_t max_buffered_bytes = 192 << 20;
  int64_t max_unsent_bytes = 8 << 20;  // of one stream; a client this far behind is dropped
  int max_connections = 16384;
  double idle_timeout_seconds = 75;     // between the requests of one connection
  double request_timeout_seconds = 30;  // from a request's first byte to its last
  double write_timeout_seconds = 30;    // without the client taking what was sent
  double keep_alive_seconds = 15;       // a stream without news for so long gets a comment; 0: never
  bool strict_requests = false;         // refuse requests with unknown fields
  LogSink log_sink;                     // empty: log lines are dropped
  // Receives "request.received" and "request.finished" with a JSON object of what is known; empty: nobody.
  std::function<void(const std::string& event, const std::string& fields)> request_sink;
  int log_requests_level = 2;  // 0: ids and sizes, 1: and sampling parameters, 2: and texts cut to 2048
                               // bytes, 3: and whole texts
};

// Serves on threads of its own from make() until stop(): two that move bytes and send tokens, and
// ServerConfig::http_threads workers. Probes (/health, /metrics) are answered while all workers are busy.
class Server {
 public:
  // Binds and listens. Until set_engine every route answers 503. kInvalidArgument (host, port), kUnavailable
  // (the port is taken).
  static Result<std::unique_ptr<Server>> make(ServerConfig config);
  virtual ~Server() = default;  // stops

  virtual int port() const = 0;
  // Called once. `engine` must outlive the server.
  virtual void set_engine(Engine& engine) = 0;
  // Answers 503 to new requests and to /health, and returns when the running ones are answered, or after the
  // deadline with the rest aborted.
  virtual void drain(double timeout_seconds) = 0;
  // Closes every connection, aborts what they wait for, and returns when the engine has let go of it.
  virtual void stop() = 0;
};

}  // namespace fp4moe
