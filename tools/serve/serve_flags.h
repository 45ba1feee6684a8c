// The flags of `fp4moe serve`.
#pragma once

#include "fp4moe/config.h"
#include "fp4moe/server.h"
#include "subcommand.h"

namespace fp4moe {

struct ServeOptions {
  EngineConfig engine;
  ServerConfig server;
  std::string config;  // applied before parsing (tools/config_file.h)
  std::string api_key, api_key_file, admin_api_key, admin_api_key_file;
  std::string unix_socket_mode = "660";
  std::string log_level = "info", log_format = "text";
  bool log_requests = false;
  int64_t decode_log_interval = 40;  // decode steps between two log lines; 0: no lines
  double drain_timeout = 60;
};

// Adds the flags of an HTTP listener, which the router has too.
void add_listener_flags(CLI::App& subcommand, ServerConfig& http);
void add_serve_flags(CLI::App& subcommand, ServeOptions& options);

// Parses options.unix_socket_mode into options.server.
Status read_mode(ServeOptions& options);
// Collects the keys from flags and files in options.server. A file has one key per line; empty lines
// and lines that begin with '#' are ignored.
Status read_keys(ServeOptions& options);

}  // namespace fp4moe
