// fp4moe run: streams one response to the terminal.
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>

#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "subcommand.h"

namespace fp4moe {

namespace {

struct RunOptions {
  EngineConfig engine;
  std::string prompt, system;
  bool raw = false, stats = false;
  int64_t max_tokens = 512;
  std::optional<float> temperature, top_p;
  std::optional<int32_t> top_k;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
};

Result<std::vector<int32_t>> prompt_ids(const Engine& engine, const RunOptions& options) {
  if (options.raw) return engine.tokenize(options.prompt, /*add_special_tokens=*/true);
  nlohmann::json messages = nlohmann::json::array();
  if (!options.system.empty()) messages.push_back({{"role", "system"}, {"content", options.system}});
  messages.push_back({{"role", "user"}, {"content", options.prompt}});
  const auto text = engine.apply_chat_template(
      messages.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), ChatTemplateOptions{});
  if (!text.ok()) return text.status();
  return engine.tokenize(*text, /*add_special_tokens=*/false);
}

int run(const RunOptions& options) {
  EngineConfig config = options.engine;
  if (Engine::is_follower(config)) return follow(config);
  config.log_sink = [](LogLevel level, const std::string& line) {
    if (level >= LogLevel::kWarning) std::fprintf(stderr, "%s\n", line.c_str());
  };
  auto made = Engine::make(config);
  if (!made.ok()) return report_error(made.status());
  Engine& engine = **made;
  Request request;
  auto ids = prompt_ids(engine, options);
  if (!ids.ok()) return report_error(ids.status());
  request.input_ids = std::move(ids).value();
  SamplingParams& s = request.sampling = engine.info().default_sampling;
  s.max_new_tokens = options.max_tokens;
  s.temperature = options.temperature.value_or(s.temperature);
  s.top_p = options.top_p.value_or(s.top_p);
  s.top_k = options.top_k.value_or(s.top_k);
  if (options.seed) s.seed = options.seed;
  s.stop = options.stop;

  std::mutex mutex;
  std::condition_variable ended;
  Delta last;  // the final delta; finish_reason is kNone until it arrives
  const auto id = engine.submit(std::move(request), [&](const Delta& delta) {
    std::fwrite(delta.text.data(), 1, delta.text.size(), stdout);
    std::fflush(stdout);
    if (delta.finish_reason == FinishReason::kNone) return;
    std::lock_guard<std::mutex> lock(mutex);
    last = delta;
    ended.notify_all();
  });
  if (!id.ok()) return report_error(id.status());
  std::unique_lock<std::mutex> lock(mutex);
  ended.wait(lock, [&] { return last.finish_reason != FinishReason::kNone; });
  std::fputc('\n', stdout);
  if (last.finish_reason == FinishReason::kError) return report_error(internal_error(last.error));
  if (options.stats)
    std::fprintf(stderr, "%lld prompt tokens, %lld output tokens\n",
                 static_cast<long long>(last.prompt_tokens), static_cast<long long>(last.completion_tokens));
  return kExitOk;
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  CLI::App* subcommand = app.add_subcommand("run", "Print one response as it is generated");
  auto options = std::make_shared<RunOptions>();
  add_engine_flags(*subcommand, options->engine);
  subcommand->add_option("-p,--prompt", options->prompt, "text of the prompt")->required();
  subcommand->add_option("--system", options->system, "system message");
  subcommand->add_flag("--raw", options->raw, "use the prompt as is, without the chat template");
  subcommand->add_option("-n,--max-tokens", options->max_tokens, "maximum output tokens")
      ->capture_default_str();
  subcommand->add_option("--temperature", options->temperature,
                         "sampling temperature; 0: greedy; default: the model's");
  subcommand->add_option("--top-p", options->top_p, "nucleus sampling probability; default: the model's");
  subcommand->add_option("--top-k", options->top_k, "number of candidate tokens; default: the model's");
  subcommand->add_option("--seed", options->seed, "sampler seed");
  subcommand->add_option("--stop", options->stop,
                         "end the output before this text; may be given several times");
  subcommand->add_flag("--stats", options->stats, "print token counts to stderr at the end");
  subcommand->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace fp4moe
