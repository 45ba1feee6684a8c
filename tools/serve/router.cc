// fp4moe router: serves one address in front of prefill and decode nodes until a signal arrives.
#include "fp4moe/router.h"

#include "config_file.h"
#include "flag_checks.h"
#include "serve/log_writer.h"
#include "serve/serve_flags.h"
#include "serve/signals.h"
#include "subcommand.h"

namespace fp4moe {

namespace {

struct RouterOptions {
  RouterConfig router;
  std::vector<std::string> prefill;  // URLs, each optionally followed by its bootstrap port
  bool pd_disaggregation = false;
  std::string log_level = "info", log_format = "text";
  double drain_timeout = 60;
};

// Parses "URL" and "URL PORT".
Status read_prefill(RouterOptions& options) {
  std::vector<RouterConfig::PrefillNode>& nodes = options.router.prefill;
  for (const std::string& word : options.prefill) {
    const bool is_port = !word.empty() && word.find_first_not_of("0123456789") == std::string::npos;
    if (!is_port) {
      nodes.push_back({.url = word});
    } else if (nodes.empty() || nodes.back().bootstrap_port != 0 || word.size() > 5 || std::stoi(word) == 0) {
      return invalid_argument("invalid --prefill value '" + word + "'; use --prefill URL [BOOTSTRAP_PORT]");
    } else {
      nodes.back().bootstrap_port = std::stoi(word);
    }
  }
  return {};
}

int route(RouterOptions options) {
  if (Status status = read_prefill(options); !status.ok()) return report_error(status);
  const sigset_t signals = block_signals();
  raise_descriptor_limit();
  return_freed_memory();
  LogWriter writer(least_level(options.log_level),
                   options.log_format == "json" ? LogWriter::Format::kJson : LogWriter::Format::kText);
  const LogSink log = [&writer](LogLevel level, const std::string& line) { writer.line(level, line); };
  options.router.http.log_sink = log;
  log(LogLevel::kInfo, "fp4moe " FP4MOE_VERSION ": router");
  auto router = Router::make(options.router);
  if (!router.ok()) return report_error(router.status());
  const std::string url = url_to_announce(options.router.http.host, (*router)->port(), log);
  log(LogLevel::kInfo,
      "endpoints: " + url +
          "/v1/chat/completions /v1/completions /v1/messages /generate /health /metrics /workers");
  for (bool was_ready = false; !signalled(signals);) {
    if (!was_ready && (*router)->is_ready()) {
      log(LogLevel::kInfo, "The server is fired up and ready to roll!");
      was_ready = true;
    }
  }
  drain_unless_signalled(signals, log, [&] { (*router)->drain(options.drain_timeout); });
  (*router)->stop();
  return kExitOk;
}

}  // namespace

void add_router(CLI::App& app, int& exit_code) {
  CLI::App* subcommand = app.add_subcommand("router", "Route requests to prefill nodes and decode nodes");
  auto options = std::make_shared<RouterOptions>();
  RouterConfig& r = options->router;
  subcommand->add_flag("--pd-disaggregation", options->pd_disaggregation,
                       "accepted without effect, because a router has no other mode");
  subcommand
      ->add_option(
          "--prefill", options->prefill,
          "URL of a prefill node, optionally followed by its bootstrap port (default: the port that the "
          "node reports); may be given several times")
      ->required()
      ->type_name("URL [PORT]")
      ->expected(1, -1);
  subcommand->add_option("--decode", r.decode, "URL of a decode node; may be given several times")
      ->required()
      ->type_name("URL");
  const auto flag = [&](const std::string& name, auto& value, const std::string& help) {
    return subcommand->add_option(name, value, help)->capture_default_str();
  };
  add_listener_flags(*subcommand, r.http);
  flag("--api-key", r.api_key,
       "key for the router's own requests to nodes; the nodes check the keys of clients");
  flag("--health-check-interval-secs", r.health_check_seconds, "seconds between two health checks of a node")
      ->check(in_range(0.05, 3600.0));
  flag("--health-check-timeout-secs", r.health_timeout_seconds, "maximum seconds for a health check")
      ->check(in_range(0.05, 3600.0));
  flag("--request-timeout-secs", r.request_timeout_seconds,
       "maximum seconds until a node's response is complete or its stream begins; 0: no limit")
      ->check(in_range(0.0, 1e9));
  flag("--quiet-timeout-secs", r.quiet_timeout_seconds,
       "maximum seconds between two pieces of a node's response that has begun; 0: no limit")
      ->check(in_range(0.0, 1e9));
  flag("--max-response-bytes", r.max_response_bytes,
       "maximum bytes of one response that a node does not stream")
      ->check(in_range(int64_t{1}, int64_t{1} << 40));
  flag("--max-held-response-bytes", r.max_held_bytes,
       "maximum total bytes of responses that the router has not forwarded yet")
      ->check(in_range(int64_t{1}, int64_t{1} << 40));
  flag("--drain-timeout", options->drain_timeout,
       "maximum seconds to wait for running requests after SIGTERM")
      ->check(in_range(0.0, 1e6));
  flag("--log-level", options->log_level, "debug, info, warning or error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  flag("--log-format", options->log_format, "text, or json: one object per line")
      ->check(CLI::IsMember({"text", "json"}));
  subcommand->callback([options, &exit_code] { exit_code = route(*options); });
}

}  // namespace fp4moe
