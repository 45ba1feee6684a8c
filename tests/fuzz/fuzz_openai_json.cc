// Any bytes as the body of the routes that read a prompt, with and without tools and grammars: nothing
// crashes, a refusal has a message, and a response that was stored can be continued.
#include <cstdint>
#include <string>
#include <utility>

#include "server/api/apis.h"
#include "server/api/responses_api.h"
#include "server/api/tokenize_api.h"
#include "server/fake_engine.h"

namespace {

using namespace fp4moe;

// Checks that the request was either parsed or refused with a message.
void check(const Fields& fields, const GenerationCall& call) {
  if (fields.ok() && (call.requests.empty() || call.format == nullptr)) __builtin_trap();
  if (!fields.ok() && fields.error().message().empty()) __builtin_trap();
  fields.unknown();
}

// Formats the response whose output is `text`; a stored one is stored.
json respond(const GenerationCall& call, const std::string& text) {
  Choice choice;
  choice.prompt_ids = call.prompts[0];
  choice.finish_reason = FinishReason::kStop;
  Delta delta;
  delta.text = choice.text = text;
  call.format->collect(choice, delta);
  return call.format->whole({choice});
}

// Sends `body` to /v1/responses, then again as the continuation of its own response.
void check_responses(const Engine& engine, json body) {
  ResponseStore store(1 << 20);
  const ResponseAccess access{store, "owner", [](int64_t) { return true; }};
  for (int turn = 0; turn < 2; ++turn) {
    Fields fields(body);
    const GenerationCall call = parse_responses(engine, access, fields);
    check(fields, call);
    if (!fields.ok() || !body.is_object()) return;
    const json response =
        respond(call, R"(<think>so</think>7<tool_call>{"name":"n__f","arguments":{}}</tool_call>)");
    if (!response.value("store", false)) return;
    body["previous_response_id"] = response["id"];
  }
}

void check_tokenize(const Engine& engine, const std::string& body) {
  static const ServerConfig config;
  HttpRequest request;
  request.body = body;
  for (const auto respond : {tokenize_response, detokenize_response, apply_template_response}) {
    const HttpResponse response = respond({engine, config, 0}, request);
    if (response.status != 200 && response.status != 400 && response.status != 404) __builtin_trap();
    if (!json::accept(response.body)) __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const FakeEngine plain;
  static const FakeEngine hermes({.chat_template = "{{ tools }}<tool_call></tool_call><think></think>",
                                  .is_system_first = true,
                                  .has_grammars = true});
  static const FakeEngine harmony(
      {.chat_template = "{{ tools }}<|channel|> developer message.thinking",
       .special_tokens = {"<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"},
       .has_grammars = true});
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto body = parse_json(text);
  if (!body.ok()) return 0;
  for (const FakeEngine* engine : {&plain, &hermes, &harmony}) {
    for (const auto parse : {parse_chat, parse_completion, parse_generate, parse_messages}) {
      Fields fields(*body);
      check(fields, parse(*engine, fields));
    }
    Fields counted(*body);
    const int64_t num_tokens = count_message_tokens(*engine, counted);
    if (counted.ok() && num_tokens < 1) __builtin_trap();
    check_responses(*engine, *body);
    check_tokenize(*engine, text);
  }
  return 0;
}
