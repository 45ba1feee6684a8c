// From the fields of a chat request to its submissions. /v1/chat/completions reads its own fields with these
// functions; the other chat APIs translate their requests into the same fields first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "server/api/chat_messages.h"
#include "server/api/generation.h"
#include "server/chat/output_dialect.h"
#include "server/json.h"

namespace fp4moe {

// A chat whose prompt has not been rendered yet.
struct ChatInput {
  OutputDialect dialect;
  ChatMessages messages;
  ChatTemplateOptions options;
  ToolUse tools;
  bool separate_reasoning = true;
  SamplingParams sampling;  // without the constraints that tools and dialect add
};

// Reads messages, template options, tools, sampling, constraints, token limit and logprobs.
ChatInput read_chat_input(const Engine& engine, Fields& fields);

struct ChatPrompt {
  std::string text;
  std::vector<int32_t> ids;
};
// Renders and tokenizes the prompt. Records errors in `fields`.
ChatPrompt render_chat(const Engine& engine, Fields& fields, const ChatInput& input);

// Renders and tokenizes the prompt, constrains the output, and adds n submissions to `call` as
// add_requests() does; returns how to parse their outputs. Records errors in `fields`.
OutputPlan add_chat(const Engine& engine, Fields& fields, ChatInput input, Request request, int64_t n,
                    GenerationCall& call);

}  // namespace fp4moe
