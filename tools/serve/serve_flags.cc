#include "serve/serve_flags.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "config_file.h"
#include "flag_checks.h"

namespace fp4moe {

namespace {

Status read_key_file(const std::string& flag, const std::string& path, std::vector<std::string>& keys) {
  std::ifstream file(path);
  if (!file) return not_found(flag + " " + path + " cannot be read");
  const size_t before = keys.size();
  for (std::string line; std::getline(file, line);) {
    line.erase(line.find_last_not_of(" \t\r") + 1);
    line.erase(0, line.find_first_not_of(" \t"));
    if (!line.empty() && line[0] != '#') keys.push_back(line);
  }
  if (keys.size() == before)
    return invalid_argument(flag + " " + path + " contains no key; it must contain one key per line");
  return {};
}

void add_http_flags(CLI::App& subcommand, ServeOptions& options) {
  ServerConfig& s = options.server;
  add_listener_flags(subcommand, s);
  const auto flag = [&subcommand](const std::string& name, auto& value, const std::string& help) {
    return subcommand.add_option(name, value, help)->capture_default_str()->group("HTTP");
  };
  flag("--unix-socket-mode", options.unix_socket_mode, "octal permissions of a unix:/path socket");
  flag("--http-threads", s.http_threads,
       "threads that parse requests, 2 to 256; 0: a quarter of the cores, 2 to 8");
  flag("--max-body-bytes", s.max_body_bytes, "maximum bytes of one HTTP request body");
  flag("--max-buffered-bytes", s.max_buffered_bytes,
       "maximum total bytes of requests being received or parsed, at least "
       "--max-body-bytes; if it is exceeded, the largest request gets 503");
  flag("--max-output-bytes", s.max_output_bytes,
       "maximum bytes of text, tokens and log-probabilities of one request's outputs");
  flag("--max-stored-response-bytes", s.max_stored_response_bytes,
       "maximum bytes of responses that /v1/responses stores in memory; 0: store none")
      ->check(not_negative());
  flag("--stream-keep-alive", s.keep_alive_seconds,
       "seconds after which an idle stream gets an SSE comment; 0: never")
      ->check(in_range(0.0, 1e6));
  flag("--stream-interval", s.stream_interval,
       "output tokens per event of a stream; the first token and the end have their own event")
      ->check(in_range(1, 1 << 20));
  subcommand.add_flag("--strict-requests", s.strict_requests, "refuse requests with unknown fields")
      ->group("HTTP");
  subcommand
      .add_flag("--accept-any-model-name", s.accept_any_model_name,
                "accept any model name in requests; responses name the served model")
      ->group("HTTP");
  flag("--drain-timeout", options.drain_timeout, "maximum seconds to wait for running requests after SIGTERM")
      ->check(in_range(0.0, 1e6));
}

void add_disaggregation_flags(CLI::App& subcommand, ServeOptions& options) {
  EngineConfig& e = options.engine;
  const auto flag = [&subcommand](const std::string& name, auto& value, const std::string& help) {
    return subcommand.add_option(name, value, help)->capture_default_str()->group("Disaggregation");
  };
  flag("--disaggregation-mode", e.disaggregation_mode,
       "role of this node; null: no disaggregation; prefill: computes prompts for decode nodes; decode: "
       "generates from those prompts; see `fp4moe router`; both need the same --speculative-algorithm if it "
       "is EAGLE, NEXTN or EAGLE3")
      ->type_name("TEXT:{null,prefill,decode}");
  flag("--disaggregation-bootstrap-port", e.disaggregation_bootstrap_port,
       "prefill: port on --host from which decode nodes fetch KV pages; 0: any free port")
      ->check(in_range(0, 65535));
  flag("--disaggregation-timeout", e.disaggregation_timeout,
       "prefill: seconds to hold KV pages that no decode node fetches")
      ->check(in_range(0.1, 1e6));
  subcommand
      .add_option("--disaggregation-secret-file", e.disaggregation_secret_file,
                  "file with the secret that all nodes share; required for addresses other than loopback")
      ->type_name("FILE")
      ->group("Disaggregation");
  flag("--disaggregation-allowed-hosts", e.disaggregation_allowed_hosts,
       "decode: prefill nodes that requests may name (HOST, HOST:PORT or *); default: loopback addresses")
      ->delimiter(',')
      ->allow_extra_args(false);  // the next argument can be the model
  flag("--disaggregation-max-connections", e.disaggregation_max_connections,
       "prefill: maximum connected decode nodes; decode: maximum remembered prefill nodes")
      ->check(in_range(1, 65536));
  flag("--disaggregation-io-timeout", e.disaggregation_io_timeout,
       "maximum seconds for the transfer of a hello or a frame, plus 1 s per 256 KiB of a frame")
      ->check(in_range(0.1, 1e6));
}

// An empty key, as from an unset shell variable, must not start a server that is open to all.
std::string refuse_empty(const std::string& key) {
  return key.empty() ? "must not be empty; omit the flag for a server without this key" : "";
}

void add_key_flags(CLI::App& subcommand, ServeOptions& options) {
  const auto flag = [&subcommand](const std::string& name, std::string& value, const std::string& help) {
    return subcommand.add_option(name, value, help)->check(refuse_empty)->group("Keys");
  };
  flag("--api-key", options.api_key,
       "key that clients must send; visible to other users of the machine, so prefer --api-key-file");
  flag("--api-key-file", options.api_key_file, "file with keys for clients, one per line")->type_name("FILE");
  flag("--admin-api-key", options.admin_api_key, "key for administrative routes, such as /abort_request");
  flag("--admin-api-key-file", options.admin_api_key_file,
       "file with keys for administrative routes, one per line")
      ->type_name("FILE");
}

// With the names behind it, the prefix must make names of the Prometheus text format.
std::string refuse_bad_prefix(const std::string& prefix) {
  const auto is_legal = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == ':'; };
  const bool is_prefix = std::all_of(prefix.begin(), prefix.end(), is_legal) &&
                         (prefix.empty() || std::isdigit(static_cast<unsigned char>(prefix[0])) == 0);
  return is_prefix
             ? ""
             : "'" + prefix + "' must consist of letters, digits, '_' and ':', and not begin with a digit";
}

void add_log_flags(CLI::App& subcommand, ServeOptions& options) {
  const auto flag = [&subcommand](const std::string& name, auto& value, const std::string& help) {
    return subcommand.add_option(name, value, help)->capture_default_str()->group("Logs and metrics");
  };
  flag("--log-level", options.log_level,
       "debug, info, warning or error; debug also logs a line for each response")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  flag("--log-format", options.log_format, "text, or json: one object per line")
      ->check(CLI::IsMember({"text", "json"}));
  subcommand.add_flag("--log-requests", options.log_requests, "log the start and end of each request")
      ->group("Logs and metrics");
  flag("--log-requests-level", options.server.log_requests_level,
       "0: ids and sizes, 1: plus sampling parameters, 2: plus texts up to 2048 bytes, 3: plus full texts")
      ->check(in_range(0, 3));
  flag("--decode-log-interval", options.decode_log_interval,
       "decode steps between two decode log lines; 0: no prefill or decode log lines")
      ->check(not_negative());
  flag("--metrics-prefix", options.server.metrics_prefix, "prefix of metric names in /metrics")
      ->check(refuse_bad_prefix);
}

}  // namespace

void add_listener_flags(CLI::App& subcommand, ServerConfig& http) {
  const auto flag = [&subcommand](const std::string& name, auto& value, const std::string& help) {
    return subcommand.add_option(name, value, help)->capture_default_str()->group("HTTP");
  };
  flag("--host", http.host, "address to listen on, or unix:/path for a socket in the file system")
      ->transform([](const std::string& host) {  // "[::1]", as in a URL, is ::1
        const bool has_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
        return has_brackets ? host.substr(1, host.size() - 2) : host;
      });
  flag("--port", http.port, "port to listen on; 0: any free port");
  flag(
      "--cors-allow-origins,--allowed-origins", http.cors_allow_origins,
      "origins of web pages that may send requests, such as https://chat.example.org; others get 403; *: all")
      ->delimiter(',')
      ->allow_extra_args(false);  // the next argument can be the model
  flag("--allowed-hosts", http.allowed_hosts,
       "names that the Host header may contain in addition to localhost and loopback addresses, such as "
       "chat.example.org; checked if given or if --host is a loopback address; *: any")
      ->delimiter(',')
      ->allow_extra_args(false);
  flag("--max-connections", http.max_connections, "maximum connected clients; further clients get 503");
}

Status read_mode(ServeOptions& options) {
  const std::string& text = options.unix_socket_mode;
  const bool is_octal =
      !text.empty() && text.size() <= 4 && text.find_first_not_of("01234567") == std::string::npos;
  if (!is_octal || std::stoi(text, nullptr, 8) > 0777)
    return invalid_argument("--unix-socket-mode " + text + " must be an octal number from 000 to 777");
  options.server.unix_socket_mode = std::stoi(text, nullptr, 8);
  return {};
}

Status read_keys(ServeOptions& options) {
  const std::pair<const char*, const std::string&> kVariables[] = {
      {"FP4MOE_API_KEY", options.api_key},
      {"FP4MOE_API_KEY_FILE", options.api_key_file},
      {"FP4MOE_ADMIN_API_KEY", options.admin_api_key},
      {"FP4MOE_ADMIN_API_KEY_FILE", options.admin_api_key_file}};
  for (const auto& [name, value] : kVariables)  // CLI11 takes an empty variable for an absent one
    if (value.empty() && std::getenv(name) != nullptr)
      return invalid_argument(std::string(name) +
                              " must not be empty; unset it for a server without this key");
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

void add_serve_flags(CLI::App& subcommand, ServeOptions& options) {
  subcommand
      .add_option(
          "--config", options.config,
          "file with flags, written without \"--\", in TOML or INI, or in flat YAML if named *.yaml or *.yml")
      ->type_name("FILE");
  add_engine_flags(subcommand, options.engine);
  add_http_flags(subcommand, options);
  add_disaggregation_flags(subcommand, options);
  add_key_flags(subcommand, options);
  add_log_flags(subcommand, options);
  add_environment_names(subcommand);
}

}  // namespace fp4moe
