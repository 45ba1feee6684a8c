#include "serve/chat_session.h"

#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "engine/request_check.h"
#include "serve/stream_output.h"

namespace fp4moe {

namespace {

constexpr std::string_view kBlockMark = "\"\"\"";

// Prints reasoning dimmed, if stdout is a terminal, and content as it is.
class ResponsePrinter {
 public:
  ResponsePrinter(std::unique_ptr<OutputParser> parser, bool hide_reasoning)
      : parser_(std::move(parser)), hide_reasoning_(hide_reasoning) {}

  void push(const std::string& text) {
    OutputParts parts;
    parser_->push(text, parts);
    print(parts);
  }
  void finish() {
    OutputParts parts;
    parser_->finish(parts);
    print(parts);
    dim(false);
    if (has_printed_) std::fputc('\n', stdout);
    std::fflush(stdout);
  }
  const std::string& content() const { return content_; }

 private:
  void print(const OutputParts& parts) {
    for (const OutputPart& part : parts) {
      const bool is_reasoning = part.kind == OutputPart::Kind::kReasoning;
      if (!is_reasoning) content_ += part.text;
      if (part.text.empty() || (is_reasoning && hide_reasoning_)) continue;
      if (!is_reasoning && has_reasoning_) std::fputs("\n\n", stdout);
      has_reasoning_ = is_reasoning;
      dim(is_reasoning);
      std::fwrite(part.text.data(), 1, part.text.size(), stdout);
      has_printed_ = true;
    }
    std::fflush(stdout);
  }
  void dim(bool on) {
    if (on == is_dim_ || !has_styles_) return;
    std::fputs(on ? "\x1b[2m" : "\x1b[0m", stdout);
    is_dim_ = on;
  }

  const std::unique_ptr<OutputParser> parser_;
  const bool hide_reasoning_;
  const bool has_styles_ = isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  bool has_reasoning_ = false;  // the last printed text was reasoning
  bool is_dim_ = false, has_printed_ = false;
  std::string content_;
};

void note(const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); }

template <class T>
Result<T> read_number(const char* command, const std::string& text) {
  T number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size())
    return invalid_argument(std::string(command) + " takes a number, not '" + text + "'");
  return number;
}

}  // namespace

ChatSession::ChatSession(Engine& engine, ChatOptions options)
    : engine_(engine), options_(std::move(options)), dialect_(detect_dialect(engine)) {}

std::span<const ChatSession::Command> ChatSession::commands() {
  static constexpr Command kCommands[] = {
      {"/help", "", "list the commands", &ChatSession::help},
      {"/clear", "", "forget the conversation; the system message remains", &ChatSession::clear},
      {"/system", "TEXT", "set the system message; without TEXT: remove it", &ChatSession::set_system},
      {"/temperature", "X", "sampling temperature; 0: greedy", &ChatSession::set_temperature},
      {"/top-p", "X", "nucleus sampling probability", &ChatSession::set_top_p},
      {"/top-k", "N", "number of candidate tokens; -1: all", &ChatSession::set_top_k},
      {"/seed", "N", "sampler seed; without N: a new one for each response", &ChatSession::set_seed},
      {"/max-tokens", "N", "maximum tokens of one response", &ChatSession::set_max_tokens},
      {"/reasoning", "show|hide", "print reasoning, or leave it out", &ChatSession::set_reasoning},
      {"/regenerate", "", "replace the last response", &ChatSession::regenerate},
      {"/quit", "", "end; so does Ctrl-D", &ChatSession::quit},
  };
  return kCommands;
}

Status ChatSession::run() {
  note("Chat with " + engine_.info().name +
       ". /help lists the commands; Ctrl-C stops a response; Ctrl-D ends.\n"
       "A line that begins with \"\"\" begins a text of several lines, up to the next \"\"\".");
  while (!is_done_) {
    std::string text;
    const Terminal::Input input = read_message(text);
    if (input == Terminal::Input::kEnd) {
      note("");
      break;
    }
    Status status;
    if (input == Terminal::Input::kInterrupt) {
      note("");
    } else if (input == Terminal::Input::kTooLong) {
      status = invalid_argument("the text is longer than " + std::to_string(kMaxLineBytes) + " bytes");
    } else if (!text.empty() && text[0] == '/') {
      status = obey(text);
    } else if (text.find_first_not_of(" \t\r\n") != std::string::npos) {
      messages_.push_back({{"role", "user"}, {"content", text}});
      status = respond();
      if (!status.ok()) messages_.erase(messages_.size() - 1);
    }
    if (!engine_.failure().ok()) return engine_.failure();
    if (!status.ok()) note("error: " + status.message());
  }
  return {};
}

// Reads a line, or the lines between two marks.
Terminal::Input ChatSession::read_message(std::string& message) {
  terminal_.take_interrupt();  // a Ctrl-C that came too late for the response
  Terminal::Input input = terminal_.read_line("> ", message);
  if (input != Terminal::Input::kLine || message.rfind(kBlockMark, 0) != 0) return input;
  message.erase(0, kBlockMark.size());
  while (true) {
    if (const size_t end = message.find(kBlockMark); end != std::string::npos) {
      message.erase(end);
      return input;
    }
    std::string line;
    input = terminal_.read_line(". ", line);
    if (input != Terminal::Input::kLine) return input;
    message += (message.empty() ? "" : "\n") + line;
    if (message.size() > kMaxLineBytes) return Terminal::Input::kTooLong;
  }
}

Status ChatSession::obey(const std::string& line) {
  const size_t space = line.find_first_of(" \t");
  const std::string name = line.substr(0, space);
  std::string argument = space == std::string::npos ? "" : line.substr(space);
  argument.erase(0, argument.find_first_not_of(" \t"));
  argument.erase(argument.find_last_not_of(" \t\r") + 1);
  std::string list;
  for (const Command& command : commands()) {
    if (name == command.name) return (this->*command.method)(argument);
    list += (list.empty() ? "" : ", ") + std::string(command.name);
  }
  return invalid_argument("'" + name + "' is not a command; use one of: " + list);
}

Result<Request> ChatSession::next_request(OutputPlan& plan) const {
  nlohmann::json messages = nlohmann::json::array();
  if (!options_.system.empty()) messages.push_back({{"role", "system"}, {"content", options_.system}});
  messages.insert(messages.end(), messages_.begin(), messages_.end());
  const auto prompt = engine_.apply_chat_template(
      messages.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), ChatTemplateOptions{});
  if (!prompt.ok()) return prompt.status();
  auto ids = engine_.tokenize(*prompt, /*add_special_tokens=*/false);
  if (!ids.ok()) return ids.status();
  plan = plan_output(dialect_, *prompt, ToolUse{}, /*separate_reasoning=*/true);
  Request request;
  request.input_ids = std::move(ids).value();
  request.sampling = options_.sampling;
  if (dialect_.needs_special_tokens) request.sampling.skip_special_tokens = false;
  return request;
}

// Generates and prints the response to the last message, and adds it to the conversation, without its
// reasoning, which chat templates leave out of earlier turns. A response that was stopped is added too.
Status ChatSession::respond() {
  OutputPlan plan;
  auto request = next_request(plan);
  if (!request.ok()) return request.status();
  ResponsePrinter printer(make_parser(plan), options_.hide_reasoning);
  terminal_.take_interrupt();
  const auto last = stream_output(
      engine_, std::move(*request), [&](const std::string& text) { printer.push(text); },
      [this] { return terminal_.take_interrupt(); });
  printer.finish();
  if (!last.ok()) return last.status();
  messages_.push_back({{"role", "assistant"}, {"content", printer.content()}});
  if (last->finish_reason == FinishReason::kAbort) note("(stopped)");
  if (last->finish_reason == FinishReason::kLength)
    note("(stopped after " + std::to_string(last->completion_tokens) + " tokens)");
  if (options_.stats)
    note(std::to_string(last->prompt_tokens) + " prompt tokens, " + std::to_string(last->cached_tokens) +
         " of them cached, " + std::to_string(last->completion_tokens) + " output tokens");
  return {};
}

Status ChatSession::help(const std::string&) {
  for (const Command& command : commands())
    std::fprintf(stderr, "  %-22s %s\n", (std::string(command.name) + " " + command.argument).c_str(),
                 command.help);
  return {};
}

Status ChatSession::clear(const std::string&) {
  messages_ = nlohmann::json::array();
  return {};
}

Status ChatSession::set_system(const std::string& argument) {
  options_.system = argument;
  return {};
}

Status ChatSession::set_reasoning(const std::string& argument) {
  if (argument != "show" && argument != "hide")
    return invalid_argument("/reasoning takes show or hide, not '" + argument + "'");
  options_.hide_reasoning = argument == "hide";
  return {};
}

// Takes over `sampling` if the engine accepts it.
Status ChatSession::set_sampling(SamplingParams sampling) {
  Request probe;
  probe.input_ids = {0};
  probe.sampling = sampling;
  const ModelInfo& info = engine_.info();
  FP4MOE_RETURN_IF_ERROR(
      check_request(probe, {.vocab_size = info.vocab_size, .context_length = info.context_length}));
  options_.sampling = std::move(sampling);
  return {};
}

Status ChatSession::set_temperature(const std::string& argument) {
  SamplingParams sampling = options_.sampling;
  FP4MOE_ASSIGN_OR_RETURN(sampling.temperature, read_number<float>("/temperature", argument));
  return set_sampling(std::move(sampling));
}

Status ChatSession::set_top_p(const std::string& argument) {
  SamplingParams sampling = options_.sampling;
  FP4MOE_ASSIGN_OR_RETURN(sampling.top_p, read_number<float>("/top-p", argument));
  return set_sampling(std::move(sampling));
}

Status ChatSession::set_top_k(const std::string& argument) {
  SamplingParams sampling = options_.sampling;
  FP4MOE_ASSIGN_OR_RETURN(sampling.top_k, read_number<int32_t>("/top-k", argument));
  return set_sampling(std::move(sampling));
}

Status ChatSession::set_max_tokens(const std::string& argument) {
  SamplingParams sampling = options_.sampling;
  FP4MOE_ASSIGN_OR_RETURN(sampling.max_new_tokens, read_number<int64_t>("/max-tokens", argument));
  return set_sampling(std::move(sampling));
}

Status ChatSession::set_seed(const std::string& argument) {
  SamplingParams sampling = options_.sampling;
  sampling.seed.reset();
  if (!argument.empty()) {
    FP4MOE_ASSIGN_OR_RETURN(sampling.seed, read_number<uint64_t>("/seed", argument));
  }
  return set_sampling(std::move(sampling));
}

Status ChatSession::regenerate(const std::string&) {
  if (messages_.empty()) return invalid_argument("/regenerate: there is no response yet");
  const nlohmann::json replaced = messages_.back();
  messages_.erase(messages_.size() - 1);
  const Status status = respond();
  if (!status.ok()) messages_.push_back(replaced);
  return status;
}

Status ChatSession::quit(const std::string&) {
  is_done_ = true;
  return {};
}

}  // namespace fp4moe
