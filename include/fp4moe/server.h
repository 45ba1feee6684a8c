// Server: the HTTP front of an Engine: OpenAI's and SGLang's routes, metrics and health.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct ServerConfig {
  std::string host = "127.0.0.1";
  int port = 30000;     // 0: any free port
  std::string api_key;  // empty: no check; else "Authorization: Bearer KEY" on all but /health
  std::string metrics_prefix = "sglang:";
  int64_t max_body_bytes = 32 << 20;
  int64_t max_header_bytes = 64 << 10;
  int64_t max_unsent_bytes = 8 << 20;  // of one stream; a client this far behind is dropped
  int max_connections = 1024;
  double idle_timeout_seconds = 75;     // between the requests of one connection
  double request_timeout_seconds = 30;  // from a request's first byte to its last
  double write_timeout_seconds = 30;    // without the client taking what was sent
  LogSink log_sink;                     // empty: log lines are dropped
};

// Serves on two threads of its own from make() until stop().
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
