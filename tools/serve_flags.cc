#include "serve_flags.h"

#include <fstream>

#include "config_file.h"

namespace fp4moe {

namespace {

Status read_key_file(const std::string& flag, const std::string& path, std::vector<std::string>& keys) {
  std::ifstream file(path);
  if (!file) return not_found(flag + " " + path + ": cannot be read");
  const size_t before = keys.size();
  for (std::string line; std::getline(file, line);) {
    line.erase(line.find_last_not_of(" \t\r") + 1);
    line.erase(0, line.find_first_not_of(" \t"));
    if (!line.empty() && line[0] != '#') keys.push_back(line);
  }
  if (keys.size() == before) return invalid_argument(flag + " " + path + ": has no key; it needs one a line");
  return {};
}

void add_http_flags(CLI::App& verb, ServeOptions& options) {
  ServerConfig& s = options.server;
  add_listener_flags(verb, s);
  const auto flag = [&verb](const std::string& name, auto& value, const std::string& help) {
    return verb.add_option(name, value, help)->capture_default_str()->group("HTTP");
  };
  flag("--unix-socket-mode", options.unix_socket_mode, "who may connect to unix:/path, in octal");
  flag("--http-threads", s.http_threads,
       "threads that parse requests, 2 to 256; 0: a quarter of the cores, 2 to 8");
  flag("--max-body-bytes", s.max_body_bytes, "of one HTTP request");
  flag(
      "--max-buffered-bytes", s.max_buffered_bytes,
      "of all requests that arrive or are parsed, at least --max-body-bytes; beyond it the largest gets 503");
  flag("--stream-keep-alive", s.keep_alive_seconds,
       "seconds after which a stream without news gets a comment; 0: never")
      ->check(CLI::Range(0.0, 1e6));
  verb.add_flag("--strict-requests", s.strict_requests, "refuse requests with fields that are not known here")
      ->group("HTTP");
  flag("--drain-timeout", options.drain_timeout, "seconds that running requests get after SIGTERM")
      ->check(CLI::Range(0.0, 1e6));
}

void add_disaggregation_flags(CLI::App& verb, ServeOptions& options) {
  EngineConfig& e = options.engine;
  const auto flag = [&verb](const std::string& name, auto& value, const std::string& help) {
    return verb.add_option(name, value, help)->capture_default_str()->group("Disaggregation");
  };
  flag("--disaggregation-mode", e.disaggregation_mode,
       "null; prefill: computes prompts for decode nodes; decode: goes on from there. See `fp4moe router`");
  flag("--disaggregation-bootstrap-port", e.disaggregation_bootstrap_port,
       "prefill: port of --host where decode nodes fetch KV pages; 0: any free one")
      ->check(CLI::Range(0, 65535));
  flag("--disaggregation-timeout", e.disaggregation_timeout,
       "prefill: seconds that KV pages are held for a decode node that does not take them")
      ->check(CLI::Range(0.1, 1e6));
  verb.add_option("--disaggregation-secret-file", e.disaggregation_secret_file,
                  "file with the secret that all nodes share; needed beyond loopback addresses")
      ->group("Disaggregation");
  flag("--disaggregation-allowed-hosts", e.disaggregation_allowed_hosts,
       "decode: prefill nodes that requests may name, HOST, HOST:PORT or *; default: loopback ones")
      ->delimiter(',')
      ->allow_extra_args(false);  // the next word may be the model
  flag("--disaggregation-max-connections", e.disaggregation_max_connections,
       "prefill: decode nodes at a time; decode: prefill nodes that are remembered")
      ->check(CLI::Range(1, 65536));
  flag("--disaggregation-io-timeout", e.disaggregation_io_timeout,
       "seconds that another node's hello, or a frame beside 1 s for each 256 KiB, may take")
      ->check(CLI::Range(0.1, 1e6));
}

void add_key_flags(CLI::App& verb, ServeOptions& options) {
  const auto flag = [&verb](const std::string& name, std::string& value, const std::string& help) {
    return verb.add_option(name, value, help)->group("Keys");
  };
  flag("--api-key", options.api_key, "key that clients must send; other users of the machine see it: better");
  flag("--api-key-file", options.api_key_file, "file with such keys, one a line");
  flag("--admin-api-key", options.admin_api_key, "key for the routes of operators, such as /abort_request");
  flag("--admin-api-key-file", options.admin_api_key_file, "file with such keys, one a line");
}

void add_log_flags(CLI::App& verb, ServeOptions& options) {
  const auto flag = [&verb](const std::string& name, auto& value, const std::string& help) {
    return verb.add_option(name, value, help)->capture_default_str()->group("Logs and metrics");
  };
  flag("--log-level", options.log_level, "debug, info, warning or error; debug has a line for each answer")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  flag("--log-format", options.log_format, "text, or json: an object a line")
      ->check(CLI::IsMember({"text", "json"}));
  verb.add_flag("--log-requests", options.log_requests, "lines for the begin and end of each request")
      ->group("Logs and metrics");
  flag("--log-requests-level", options.server.log_requests_level,
       "0: ids and sizes, 1: and sampling parameters, 2: and texts up to 2048 bytes, 3: all")
      ->check(CLI::Range(0, 3));
  flag("--decode-log-interval", options.decode_log_interval,
       "decode steps between two log lines; 0: no lines about batches")
      ->check(CLI::NonNegativeNumber);
  flag("--metrics-prefix", options.server.metrics_prefix, "in front of the names in /metrics");
}

}  // namespace

void add_listener_flags(CLI::App& verb, ServerConfig& http) {
  const auto flag = [&verb](const std::string& name, auto& value, const std::string& help) {
    return verb.add_option(name, value, help)->capture_default_str()->group("HTTP");
  };
  flag("--host", http.host, "address to listen on, or unix:/path for a socket in the file system");
  flag("--port", http.port, "port to listen on; 0: any free one");
  flag("--cors-allow-origins,--allowed-origins", http.cors_allow_origins,
       "web pages that may ask, such as https://chat.example.org; others get 403; *: all")
      ->delimiter(',')
      ->allow_extra_args(false);  // the next word may be the model
  flag("--allowed-hosts", http.allowed_hosts,
       "names that requests may have in Host beside localhost and loopback addresses, such as "
       "chat.example.org; "
       "checked if given or if --host is a loopback address; *: any")
      ->delimiter(',')
      ->allow_extra_args(false);
  flag("--max-connections", http.max_connections, "clients at a time; more get 503");
}

Status read_mode(ServeOptions& options) {
  const std::string& text = options.unix_socket_mode;
  const bool is_octal =
      !text.empty() && text.size() <= 4 && text.find_first_not_of("01234567") == std::string::npos;
  if (!is_octal || std::stoi(text, nullptr, 8) > 0777)
    return invalid_argument("--unix-socket-mode " + text + " is not in 000 to 777");
  options.server.unix_socket_mode = std::stoi(text, nullptr, 8);
  return {};
}

Status read_keys(ServeOptions& options) {
  ServerConfig& s = options.server;
  if (!options.api_key.empty()) s.api_keys.push_back(options.api_key);
  if (!options.admin_api_key.empty()) s.admin_api_keys.push_back(options.admin_api_key);
  if (!options.api_key_file.empty()) {
    if (Status status = read_key_file("--api-key-file", options.api_key_file, s.api_keys); !status.ok())
      return status;
  }
  if (options.admin_api_key_file.empty()) return {};
  return read_key_file("--admin-api-key-file", options.admin_api_key_file, s.admin_api_keys);
}

void add_serve_flags(CLI::App& verb, ServeOptions& options) {
  verb.add_option("--config", options.config,
                  "file of flags without their \"--\": TOML or INI, or flat YAML if named *.yaml");
  add_engine_flags(verb, options.engine);
  add_http_flags(verb, options);
  add_disaggregation_flags(verb, options);
  add_key_flags(verb, options);
  add_log_flags(verb, options);
  add_environment_names(verb);
}

}  // namespace fp4moe
