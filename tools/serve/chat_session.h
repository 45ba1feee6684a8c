// A chat on a terminal: fp4moe run without a prompt.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "fp4moe/engine.h"
#include "serve/terminal.h"
#include "server/chat/output_dialect.h"

namespace fp4moe {

struct ChatOptions {
  std::string system;       // empty: no system message
  SamplingParams sampling;  // changed by commands
  bool hide_reasoning = false, stats = false;
};

class ChatSession {
 public:
  // `engine` must outlive the session and have a chat template.
  ChatSession(Engine& engine, ChatOptions options);

  // Reads lines and commands until /quit or the end of the input. Responses go to stdout, everything else to
  // stderr. OK, or the engine's failure.
  Status run();

 private:
  using Method = Status (ChatSession::*)(const std::string& argument);
  struct Command {
    const char *name, *argument, *help;
    Method method;
  };
  static std::span<const Command> commands();

  Terminal::Input read_message(std::string& message);
  Status obey(const std::string& line);
  Status respond();
  Result<Request> next_request(OutputPlan& plan) const;

  // The commands. Errors do not end the session.
  Status help(const std::string& argument);
  Status clear(const std::string& argument);
  Status set_system(const std::string& argument);
  Status set_sampling(SamplingParams sampling);
  Status set_temperature(const std::string& argument);
  Status set_top_p(const std::string& argument);
  Status set_top_k(const std::string& argument);
  Status set_seed(const std::string& argument);
  Status set_max_tokens(const std::string& argument);
  Status set_reasoning(const std::string& argument);
  Status regenerate(const std::string& argument);
  Status quit(const std::string& argument);

  Engine& engine_;
  ChatOptions options_;
  const OutputDialect dialect_;
  Terminal terminal_;
  nlohmann::json messages_ = nlohmann::json::array();  // without the system message
  bool is_done_ = false;
};

}  // namespace fp4moe
