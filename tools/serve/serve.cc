// fp4moe serve: loads a model and serves HTTP until a signal arrives.
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <utility>

#include "serve/batch_log.h"
#include "serve/load_progress.h"
#include "serve/log_writer.h"
#include "serve/serve_flags.h"
#include "serve/service_manager.h"
#include "serve/signals.h"
#include "server/http/server_url.h"
#include "unknown_names.h"

namespace fp4moe {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void print_ready(const ServeOptions& options, const Server& server, const ModelInfo& info,
                 double start_seconds) {
  const LogSink& log = options.server.log_sink;
  const std::string& host = options.server.host;
  const std::string url = url_to_announce(host, server.port(), log);
  log(LogLevel::kInfo, "endpoints: " + url +
                           "/v1/chat/completions /v1/completions /v1/messages /v1/models /generate /tokenize "
                           "/detokenize /health /metrics /server_info /expert_load");
  if (info.disaggregation_mode == "prefill")
    log(LogLevel::kInfo, fmt::format("prefill node: decode nodes fetch KV pages at {}:{}",
                                     url_host(options.engine.disaggregation_bootstrap_host),
                                     info.disaggregation_bootstrap_port));
  if (info.disaggregation_mode == "decode")
    log(LogLevel::kInfo, "decode node: send requests through `fp4moe router`");
  log(LogLevel::kInfo, "chat page: " + url + "/");
  const std::string key = options.server.api_keys.empty() ? "" : "-H 'Authorization: Bearer KEY' ";
  log(LogLevel::kInfo,
      fmt::format(
          "try: curl {}{}/v1/chat/completions {}-H 'Content-Type: application/json' -d '{{\"model\": \"{}\", "
          "\"messages\": [{{\"role\": \"user\", \"content\": \"Hello\"}}]}}'",
          is_unix_socket(host) ? "--unix-socket " + host.substr(5) + " " : "", url, key, info.name));
  log(LogLevel::kInfo, fmt::format("started in {:.1f} s", start_seconds));
  log(LogLevel::kInfo, "The server is fired up and ready to roll!");
}

// Loads on another thread, so that this thread can draw progress and handle signals. Returns nullopt if a
// signal arrives.
std::optional<Result<std::unique_ptr<Engine>>> load(EngineConfig config, const sigset_t& signals) {
  LoadProgress progress;
  config.progress_sink = progress.sink();
  auto engine = std::async(std::launch::async, [&config] { return Engine::make(config); });
  while (engine.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (signalled(signals)) return std::nullopt;
    progress.draw();
  }
  progress.finish();
  return engine.get();
}

int drain(const ServeOptions& options, Server& server, ServiceManager& manager, const sigset_t& signals) {
  manager.stopping();
  drain_unless_signalled(signals, options.server.log_sink, [&] { server.drain(options.drain_timeout); });
  server.stop();
  return kExitOk;
}

// Called after a rank has failed or a step is stuck: ends open requests with the error and then ends the
// process, even if ranks or threads hang.
[[noreturn]] void fail(const ServeOptions& options, Server& server, Engine& engine) {
  constexpr double kSecondsToRespond = 0.5;
  constexpr auto kMostPatience = std::chrono::seconds(5);
  options.server.log_sink(LogLevel::kError,
                          "the engine has failed, shutting down: " + engine.failure().message());
  auto drained = std::async(std::launch::async, [&] {
    server.drain(kSecondsToRespond);
    server.stop();
  });
  drained.wait_for(kMostPatience);
  engine.abort();
  _exit(1);
}

// warnings: about the command, to be logged.
int serve(ServeOptions options, const std::vector<std::string>& warnings) {
  if (Engine::is_follower(options.engine)) return follow(options.engine);
  const Clock::time_point start = Clock::now();
  if (Status status = read_mode(options); !status.ok()) return report_error(status);
  if (Status status = read_keys(options); !status.ok()) return report_error(status);
  if (!is_unix_socket(options.server.host))
    options.engine.disaggregation_bootstrap_host = options.server.host;
  const sigset_t signals = block_signals();
  raise_descriptor_limit();
  return_freed_memory();
  LogWriter writer(least_level(options.log_level),
                   options.log_format == "json" ? LogWriter::Format::kJson : LogWriter::Format::kText);
  const LogSink log = [&writer](LogLevel level, const std::string& line) { writer.line(level, line); };
  options.engine.log_sink = log;
  options.server.log_sink = log;
  if (options.log_requests) {
    options.server.request_sink = [&writer](const std::string& event, const std::string& fields) {
      writer.event(event, event + " " + fields, fields);
    };
  }
  ServiceManager manager;
  log(LogLevel::kInfo, "fp4moe " FP4MOE_VERSION ": " + options.engine.model_path);
  for (const std::string& warning : warnings) log(LogLevel::kWarning, warning);
  auto server = Server::make(options.server);
  if (!server.ok()) return report_error(server.status());
  auto engine = load(options.engine, signals);
  if (!engine) {
    log(LogLevel::kInfo, "shutting down before the model was loaded");
    _exit(kExitOk);  // loading cannot be interrupted
  }
  if (!engine->ok()) return report_error(engine->status());
  Engine& loaded = ***engine;
  for (const std::string& line : loaded.info().startup_lines) log(LogLevel::kInfo, line);
  (*server)->set_engine(loaded);
  print_ready(options, **server, loaded.info(), seconds_since(start));
  manager.ready("serving " + loaded.info().name);
  BatchLog batches(writer, options.decode_log_interval);
  while (!signalled(signals)) {
    const EngineStats stats = loaded.stats();
    batches.tick(stats);
    manager.tick(stats);
    if (!loaded.failure().ok()) fail(options, **server, loaded);
  }
  const int code = drain(options, **server, manager, signals);
  batches.tick(loaded.stats());                                    // logs the activity since the last tick
  server = Result<std::unique_ptr<Server>>(cancelled("stopped"));  // destroyed before the engine that it uses
  return code;
}

}  // namespace

void add_serve(CLI::App& app, int& exit_code) {
  CLI::App* subcommand =
      app.add_subcommand("serve", "Serve a model over HTTP with OpenAI's and SGLang's routes");
  auto options = std::make_shared<ServeOptions>();
  options->engine.self_test = "fast";  // is cheap compared with loading and detects wrong output
  add_serve_flags(*subcommand, *options);
  subcommand->callback(
      [options, subcommand, &exit_code] { exit_code = serve(*options, misspelt_variables(*subcommand)); });
}

}  // namespace fp4moe
