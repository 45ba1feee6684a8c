// fp4moe serve: loads a model and answers over HTTP until a signal.
#include "fp4moe/server.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <mutex>
#include <utility>

#include "load_progress.h"
#include "verb.h"

namespace fp4moe {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kInterrupted = 130;
constexpr auto kTick = std::chrono::milliseconds(100);
// timeout(1) sends its signal to the server and to the server's process group, and wrappers pass a terminal's
// Ctrl-C on to a child that already had it: what follows within this time is the same wish.
constexpr auto kSameSignal = std::chrono::milliseconds(500);

struct ServeOptions {
  EngineConfig engine;
  ServerConfig server;
  std::string log_level = "info";
  int64_t decode_log_interval = 40;  // decode steps between two lines; 0: none
  double drain_timeout = 60;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Lines on stdout, "[time] text"; below the level nothing.
LogSink make_log(const std::string& level) {
  const LogLevel least = level == "debug"     ? LogLevel::kDebug
                         : level == "warning" ? LogLevel::kWarning
                         : level == "error"   ? LogLevel::kError
                                              : LogLevel::kInfo;
  auto mutex = std::make_shared<std::mutex>();
  return [least, mutex](LogLevel line_level, const std::string& line) {
    if (line_level < least) return;
    const char* mark = line_level == LogLevel::kError     ? "error: "
                       : line_level == LogLevel::kWarning ? "warning: "
                                                          : "";
    std::lock_guard<std::mutex> lock(*mutex);
    fmt::print("[{:%Y-%m-%d %H:%M:%S}] {}{}\n", fmt::localtime(std::time(nullptr)), mark, line);
    std::fflush(stdout);
  };
}

// The signals are blocked in every thread and taken by the main one.
sigset_t block_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  return set;
}

// Waits for a signal at most one tick.
bool signalled(const sigset_t& set) {
  const timespec wait{0, std::chrono::nanoseconds(kTick).count()};
  return sigtimedwait(&set, nullptr, &wait) > 0;
}

// Prints SGLang's lines about batches: of prompts, those since the last tick; of decodes, one every
// `interval` steps. The engine counts tokens, not steps: a step gives each running request one token.
class BatchLog {
 public:
  BatchLog(const LogSink& log, int64_t interval) : log_(log), interval_(interval) {}

  void tick(const EngineStats& now) {
    const EngineStats last = std::exchange(last_, now);
    if (interval_ <= 0) return;
    const double usage = static_cast<double>(now.num_used_tokens) /
                         static_cast<double>(std::max<int64_t>(now.max_total_num_tokens, 1));
    if (now.num_prompts_total > last.num_prompts_total)
      log_(LogLevel::kInfo,
           fmt::format("Prefill batch, #new-seq: {}, #new-token: {}, #cached-token: 0, token usage: {:.2f}, "
                       "#running-req: {}, #queue-req: {}",
                       now.num_prompts_total - last.num_prompts_total,
                       now.prompt_tokens_total - last.prompt_tokens_total, usage, now.num_running_reqs,
                       now.num_queue_reqs));
    if (now.num_running_reqs == 0) return;
    steps_ += static_cast<double>(now.generation_tokens_total - last.generation_tokens_total) /
              static_cast<double>(now.num_running_reqs);
    if (steps_ < static_cast<double>(interval_)) return;
    steps_ = 0;
    log_(LogLevel::kInfo, fmt::format("Decode batch, #running-req: {}, #token: {}, token usage: {:.2f}, gen "
                                      "throughput (token/s): {:.2f}, "
                                      "#queue-req: {}",
                                      now.num_running_reqs, now.num_used_tokens, usage, now.gen_throughput,
                                      now.num_queue_reqs));
  }

 private:
  const LogSink& log_;
  const int64_t interval_;
  EngineStats last_;
  double steps_ = 0;
};

void print_ready(const ServeOptions& options, const Server& server, const ModelInfo& info,
                 double start_seconds) {
  const LogSink& log = options.server.log_sink;
  const std::string url = fmt::format("http://{}:{}", options.server.host, server.port());
  log(LogLevel::kInfo, "endpoints: " + url +
                           "/v1/chat/completions /v1/completions /v1/models /generate /tokenize "
                           "/detokenize /health /metrics /server_info");
  const std::string key = options.server.api_key.empty() ? "" : "-H 'Authorization: Bearer KEY' ";
  log(LogLevel::kInfo,
      fmt::format(
          "try: curl {}/v1/chat/completions {}-H 'Content-Type: application/json' -d '{{\"model\": \"{}\", "
          "\"messages\": [{{\"role\": \"user\", \"content\": \"Hello\"}}]}}'",
          url, key, info.name));
  log(LogLevel::kInfo, fmt::format("started in {:.1f} s", start_seconds));
  log(LogLevel::kInfo, "The server is fired up and ready to roll!");
}

// Loads on another thread, so that this one can draw progress and take signals. Empty if interrupted.
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

int drain(const ServeOptions& options, Server& server, const sigset_t& signals) {
  options.server.log_sink(LogLevel::kInfo,
                          "shutting down: running requests are finished; a second signal aborts them");
  auto drained = std::async(std::launch::async, [&] { server.drain(options.drain_timeout); });
  const Clock::time_point first = Clock::now();
  while (drained.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (signalled(signals) && Clock::now() - first > kSameSignal) _exit(kInterrupted);
  }
  server.stop();
  return kExitOk;
}

// A rank has failed: what is open is answered with the error, and the process ends, whatever its ranks do.
[[noreturn]] void fail(const ServeOptions& options, Server& server, Engine& engine) {
  constexpr double kSecondsToAnswer = 0.5;
  server.drain(kSecondsToAnswer);
  options.server.log_sink(LogLevel::kError,
                          "the engine has failed, the server ends: " + engine.failure().message());
  server.stop();
  engine.abort();
  _exit(1);
}

int serve(ServeOptions options) {
  if (Engine::is_follower(options.engine)) return follow(options.engine);
  const Clock::time_point start = Clock::now();
  const sigset_t signals = block_signals();
  const LogSink log = make_log(options.log_level);
  options.engine.log_sink = log;
  options.server.log_sink = log;
  log(LogLevel::kInfo, "fp4moe " FP4MOE_VERSION ": " + options.engine.model_path);
  auto server = Server::make(options.server);
  if (!server.ok()) return report_error(server.status());
  auto engine = load(options.engine, signals);
  if (!engine) {
    log(LogLevel::kInfo, "shutting down: nothing was loaded yet");
    _exit(kExitOk);  // the loading thread cannot be stopped half-way
  }
  if (!engine->ok()) return report_error(engine->status());
  Engine& loaded = ***engine;
  for (const std::string& line : loaded.info().startup_lines) log(LogLevel::kInfo, line);
  (*server)->set_engine(loaded);
  print_ready(options, **server, loaded.info(), seconds_since(start));
  BatchLog batches(log, options.decode_log_interval);
  while (!signalled(signals)) {
    batches.tick(loaded.stats());
    if (!loaded.failure().ok()) fail(options, **server, loaded);
  }
  const int code = drain(options, **server, signals);
  server = Result<std::unique_ptr<Server>>(cancelled("stopped"));  // before the engine that it uses
  return code;
}

}  // namespace

void add_serve(CLI::App& app, int& exit_code) {
  CLI::App* verb = app.add_subcommand("serve", "Serve a model over HTTP (OpenAI's and SGLang's routes)");
  auto options = std::make_shared<ServeOptions>();
  options->engine.self_test = "fast";  // costs little beside loading, and a wrong answer costs more
  add_engine_flags(*verb, options->engine);
  ServerConfig& s = options->server;
  const auto flag = [verb](const std::string& name, auto& value, const std::string& help) {
    return verb->add_option(name, value, help)->capture_default_str()->group("HTTP");
  };
  flag("--host", s.host, "address to listen on")->envname("FP4MOE_HOST");
  flag("--port", s.port, "port to listen on; 0: any free one")->envname("FP4MOE_PORT");
  flag("--api-key", s.api_key, "key that clients must send; empty: none")->envname("FP4MOE_API_KEY");
  flag("--metrics-prefix", s.metrics_prefix, "in front of the names in /metrics");
  flag("--max-connections", s.max_connections, "clients at a time");
  flag("--max-body-bytes", s.max_body_bytes, "of one HTTP request");
  flag("--drain-timeout", options->drain_timeout, "seconds that running requests get after SIGTERM")
      ->check(CLI::Range(0.0, 1e6));
  flag("--log-level", options->log_level, "debug, info, warning or error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  flag("--decode-log-interval", options->decode_log_interval,
       "decode steps between two log lines; 0: no lines about batches")
      ->check(CLI::NonNegativeNumber);
  verb->callback([options, &exit_code] { exit_code = serve(*options); });
}

}  // namespace fp4moe
