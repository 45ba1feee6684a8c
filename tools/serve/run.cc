// fp4moe run: one response to a prompt from a flag or stdin, or a chat on the terminal.
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "serve/chat_session.h"
#include "serve/stream_output.h"
#include "subcommand.h"

namespace fp4moe {

namespace {

constexpr size_t kMaxPromptBytes = 16 << 20;  // from stdin

struct RunOptions {
  EngineConfig engine;
  std::optional<std::string> prompt;
  std::string system;
  bool raw = false, stats = false, hide_reasoning = false;
  std::optional<int64_t> max_tokens;
  std::optional<float> temperature, top_p;
  std::optional<int32_t> top_k;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
};

Result<std::vector<int32_t>> prompt_ids(const Engine& engine, const RunOptions& options) {
  if (options.raw) return engine.tokenize(*options.prompt, /*add_special_tokens=*/true);
  nlohmann::json messages = nlohmann::json::array();
  if (!options.system.empty()) messages.push_back({{"role", "system"}, {"content", options.system}});
  messages.push_back({{"role", "user"}, {"content", *options.prompt}});
  const auto text = engine.apply_chat_template(
      messages.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), ChatTemplateOptions{});
  if (!text.ok()) return text.status();
  return engine.tokenize(*text, /*add_special_tokens=*/false);
}

SamplingParams sampling(const Engine& engine, const RunOptions& options, int64_t max_tokens) {
  SamplingParams s = engine.info().default_sampling;
  s.max_new_tokens = options.max_tokens.value_or(max_tokens);
  s.temperature = options.temperature.value_or(s.temperature);
  s.top_p = options.top_p.value_or(s.top_p);
  s.top_k = options.top_k.value_or(s.top_k);
  if (options.seed) s.seed = options.seed;
  s.stop = options.stop;
  return s;
}

// Reads all of stdin; a final line feed is not part of the prompt.
Result<std::string> read_prompt() {
  std::string text;
  char bytes[1 << 16];
  while (const size_t num_bytes = std::fread(bytes, 1, sizeof bytes, stdin)) {
    text.append(bytes, num_bytes);
    if (text.size() > kMaxPromptBytes)
      return invalid_argument("the prompt on stdin is longer than " + std::to_string(kMaxPromptBytes) +
                              " bytes");
  }
  if (std::ferror(stdin) != 0) return unavailable("stdin cannot be read");
  if (!text.empty() && text.back() == '\n') text.pop_back();
  if (text.empty())
    return invalid_argument("stdin contains no prompt; use --prompt TEXT, or a terminal for a chat");
  return text;
}

Status respond_once(Engine& engine, const RunOptions& options) {
  constexpr int64_t kDefaultTokens = 512;
  Request request;
  auto ids = prompt_ids(engine, options);
  if (!ids.ok()) return ids.status();
  request.input_ids = std::move(ids).value();
  request.sampling = sampling(engine, options, kDefaultTokens);
  const auto last = stream_output(
      engine, std::move(request),
      [](const std::string& text) {
        std::fwrite(text.data(), 1, text.size(), stdout);
        std::fflush(stdout);
      },
      [] { return false; });
  if (!last.ok()) return last.status();
  std::fputc('\n', stdout);
  if (options.stats)
    std::fprintf(stderr, "%lld prompt tokens, %lld output tokens\n",
                 static_cast<long long>(last->prompt_tokens),
                 static_cast<long long>(last->completion_tokens));
  return {};
}

Status chat(Engine& engine, const RunOptions& options) {
  if (engine.info().chat_template.empty())
    return unsupported(
        "a chat requires a chat template, and this checkpoint has none; use --chat-template FILE, or --raw "
        "--prompt TEXT");
  ChatSession session(engine, {.system = options.system,
                               .sampling = sampling(engine, options, engine.info().context_length),
                               .hide_reasoning = options.hide_reasoning,
                               .stats = options.stats});
  return session.run();
}

int run(RunOptions options) {
  EngineConfig config = options.engine;
  if (Engine::is_follower(config)) return follow(config);
  const bool is_chat = !options.prompt && isatty(STDIN_FILENO) == 1;
  if (is_chat && options.raw)
    return report_error(invalid_argument("--raw requires --prompt TEXT, or the prompt on stdin"));
  if (!is_chat && !options.prompt) {
    auto prompt = read_prompt();
    if (!prompt.ok()) return report_error(prompt.status());
    options.prompt = std::move(prompt).value();
  }
  config.log_sink = [](LogLevel level, const std::string& line) {
    if (level >= LogLevel::kWarning) std::fprintf(stderr, "%s\n", line.c_str());
  };
  if (is_chat) std::fprintf(stderr, "loading %s\n", config.model_path.c_str());
  auto made = Engine::make(config);
  if (!made.ok()) return report_error(made.status());
  const Status status = is_chat ? chat(**made, options) : respond_once(**made, options);
  return status.ok() ? kExitOk : report_error(status);
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  CLI::App* subcommand = app.add_subcommand("run", "Print the response to a prompt, or chat on a terminal");
  auto options = std::make_shared<RunOptions>();
  add_engine_flags(*subcommand, options->engine);
  subcommand->add_option("-p,--prompt", options->prompt,
                         "text of the prompt; default: all of stdin, or a chat if stdin is a terminal");
  subcommand->add_option("--system", options->system, "system message");
  subcommand->add_flag("--raw", options->raw, "use the prompt as is, without the chat template");
  subcommand->add_flag("--hide-reasoning", options->hide_reasoning,
                       "in a chat: do not print the model's reasoning, which is dimmed by default");
  subcommand->add_option("-n,--max-tokens", options->max_tokens,
                         "maximum output tokens; default: 512, in a chat the rest of the context");
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
