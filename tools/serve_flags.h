// The flags of `fp4moe serve`.
#pragma once

#include "fp4moe/config.h"
#include "fp4moe/server.h"
#include "verb.h"

namespace fp4moe {

struct ServeOptions {
  EngineConfig engine;
  ServerConfig server;
  std::string config;  // read before all others: tools/config_file.h
  std::string api_key, api_key_file, admin_api_key, admin_api_key_file;
  std::string unix_socket_mode = "660";
  std::string log_level = "info", log_format = "text";
  bool log_requests = false;
  int64_t decode_log_interval = 40;  // decode steps between two lines; 0: none
  double drain_timeout = 60;
};

// The flags of every HTTP listener; the router has them too.
void add_listener_flags(CLI::App& verb, ServerConfig& http);
void add_serve_flags(CLI::App& verb, ServeOptions& options);

// Takes the socket's mode over into options.server.
Status read_mode(ServeOptions& options);
// Takes the keys given as text and in files over into options.server. A file has one key a line; empty lines
// and those that begin with '#' are none.
Status read_keys(ServeOptions& options);

}  // namespace fp4moe
