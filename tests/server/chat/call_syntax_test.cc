// Tool calls in the syntaxes of GLM, Qwen3.5 and Kimi.
#include <gtest/gtest.h>

#include "server/chat/chat_requests.h"

namespace fp4moe {
namespace {

const FakeOptions kGlm{.chat_template = "{{ tools }}<tool_call><arg_key><arg_value><think></think>",
                       .has_grammars = true};

TEST(CallSyntax, CallsWithArgumentTags) {
  TestServer s(kGlm);
  const std::string call = "<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>";
  const std::string text = "<think>Hm.</think>\nI look.\n" + call + "\n<tool_call>wait</tool_call>";
  const json whole = choice(s, chat(text, tools()));
  EXPECT_EQ(whole["finish_reason"], "tool_calls");
  EXPECT_EQ(whole["message"]["content"], "I look.");
  EXPECT_EQ(whole["message"]["reasoning_content"], "Hm.");
  ASSERT_EQ(whole["message"]["tool_calls"].size(), 2u);
  EXPECT_EQ(whole["message"]["tool_calls"][0]["function"],
            (json{{"name", "look"}, {"arguments", "{\"x\": 1}"}}));
  EXPECT_EQ(whole["message"]["tool_calls"][1]["function"], (json{{"name", "wait"}, {"arguments", "{}"}}));
  const json stream = collected(s, chat(text, tools()));
  EXPECT_EQ(stream["content"], "I look.");
  EXPECT_EQ(stream["reasoning_content"], "Hm.");
  EXPECT_EQ(stream["tool_calls"],
            json::parse(R"([{"name":"look","arguments":"{\"x\": 1}"},{"name":"wait","arguments":"{}"}])"));
  const json text_tool = json::parse(
      R"([{"type":"function","function":{"name":"look","parameters":{"properties":{"x":{"type":"string"}}}}}])");
  const json as_text = choice(s, chat(call, {{"tools", text_tool}}));
  EXPECT_EQ(as_text["message"]["tool_calls"][0]["function"]["arguments"], R"({"x": "1"})")
      << "the schema says that x is a string";
  EXPECT_EQ(choice(s, chat(call))["message"]["content"], call) << "without tools";
}

TEST(CallSyntax, ForcedCallsWithArgumentTags) {
  TestServer s(kGlm);
  choice(s, chat("x", tools({{"tool_choice", "required"}})));
  const json format = json::parse(s.engine.last_request().sampling.grammar.text)["format"]["elements"][1];
  ASSERT_EQ(format["type"], "tags_with_separator") << format;
  const json& tag = format["tags"][0];
  EXPECT_EQ(tag["begin"], "<tool_call>look\n");
  EXPECT_EQ(tag["content"]["style"], "glm_xml");
  EXPECT_EQ(tag["content"]["json_schema"]["properties"]["x"]["type"], "integer");
  EXPECT_EQ(tag["end"], "</tool_call>");
}

const FakeOptions kQwen{.chat_template = "{{ tools }}<tool_call><function=<parameter=<think></think>",
                        .has_grammars = true};
const std::string kQwenCall =
    "<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";

TEST(CallSyntax, CallsWithFunctionTags) {
  TestServer s(kQwen);
  const std::string text = "<think>\nHm.\n</think>\n\nI look.\n\n" + kQwenCall +
                           "\n<tool_call>\n<function=wait>\n</function>\n</tool_call>";
  const json whole = choice(s, chat(text, tools()));
  EXPECT_EQ(whole["finish_reason"], "tool_calls");
  EXPECT_EQ(whole["message"]["content"], "I look.");
  EXPECT_EQ(whole["message"]["reasoning_content"], "Hm.");
  ASSERT_EQ(whole["message"]["tool_calls"].size(), 2u);
  EXPECT_EQ(whole["message"]["tool_calls"][0]["function"],
            (json{{"name", "look"}, {"arguments", "{\"x\": 1}"}}));
  EXPECT_EQ(whole["message"]["tool_calls"][1]["function"], (json{{"name", "wait"}, {"arguments", "{}"}}));
  const json stream = collected(s, chat(text, tools()));
  EXPECT_EQ(stream["content"], "I look.");
  EXPECT_EQ(stream["reasoning_content"], "Hm.");
  EXPECT_EQ(stream["tool_calls"],
            json::parse(R"([{"name":"look","arguments":"{\"x\": 1}"},{"name":"wait","arguments":"{}"}])"));
  EXPECT_EQ(stream["finish_reason"], "tool_calls");
  EXPECT_EQ(choice(s, chat(kQwenCall))["message"]["content"], kQwenCall) << "without tools";
  const json early = choice(s, chat("<think>Hm.\n" + kQwenCall, tools()))["message"];
  EXPECT_EQ(early["reasoning_content"], "Hm.");
  EXPECT_EQ(early["tool_calls"].size(), 1u) << "calls end reasoning";
  const json bare = choice(s, chat("<function=wait>\n</function>\n</tool_call>", tools()))["message"];
  EXPECT_EQ(bare["tool_calls"].size(), 1u) << "a function without parameters is known";
}

TEST(CallSyntax, CallsWithFunctionTagsInOtherApis) {
  TestServer s(kQwen);
  const std::string text = "Hm.\n</think>\n\nI look.\n\n" + kQwenCall + "<think>\n";  // ends as the prompt
  const json schema = {{"type", "object"}, {"properties", {{"x", {{"type", "string"}}}}}};
  const HttpAnswer message = http_post(s.port, "/v1/messages",
                                       json{{"model", "fake"},
                                            {"max_tokens", 999},
                                            {"thinking", {{"type", "adaptive"}}},
                                            {"tools", {{{"name", "look"}, {"input_schema", schema}}}},
                                            {"messages", {{{"role", "user"}, {"content", text}}}}}
                                           .dump());
  ASSERT_EQ(message.status, 200) << message.body;
  const json blocks = json::parse(message.body)["content"];
  ASSERT_GE(blocks.size(), 3u) << blocks;
  EXPECT_EQ(blocks[0]["thinking"], "Hm.");
  EXPECT_EQ(blocks[1]["text"], "I look.");
  EXPECT_EQ(blocks[2]["input"], (json{{"x", "1"}})) << "the schema says that x is a string";
  const HttpAnswer response = http_post(
      s.port, "/v1/responses",
      json{{"tools", {{{"type", "function"}, {"name", "look"}, {"parameters", schema}}}}, {"input", text}}
          .dump());
  ASSERT_EQ(response.status, 200) << response.body;
  const json output = json::parse(response.body)["output"];
  ASSERT_GE(output.size(), 3u) << output;
  EXPECT_EQ(output[0]["type"], "reasoning");
  EXPECT_EQ(output[1]["content"][0]["text"], "I look.");
  EXPECT_EQ(output[2]["name"], "look");
  EXPECT_EQ(output[2]["arguments"], "{\"x\": \"1\"}");
}

TEST(CallSyntax, ForcedCallsWithFunctionTags) {
  FakeOptions options = kQwen;
  options.special_tokens = {"<tool_call>", "</think>"};  // 257, 258
  TestServer s(options);
  choice(s, chat("x", tools({{"tool_choice", "required"}})));
  const json format = json::parse(s.engine.last_request().sampling.grammar.text)["format"];
  EXPECT_EQ(format["elements"][0]["content"]["elements"][1]["exclude_tokens"], (json{258, 257, 256}))
      << "the parser ends the reasoning where the grammar does: " << format;
  ASSERT_EQ(format["elements"][1]["type"], "tags_with_separator") << format;
  const json& tag = format["elements"][1]["tags"][0];
  EXPECT_EQ(tag["begin"], "<tool_call>\n<function=look>\n");
  EXPECT_EQ(tag["content"]["style"], "qwen_xml");
  EXPECT_EQ(tag["content"]["max_whitespace_cnt"], 1);
  EXPECT_EQ(tag["content"]["json_schema"]["properties"]["x"]["type"], "integer");
  EXPECT_EQ(tag["end"], "</function>\n</tool_call>");
}

const FakeOptions kKimi{
    .chat_template = "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|><think></think>",
    .special_tokens = {"<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
                       "<|tool_call_end|>", "<|tool_calls_section_end|>"},
    .has_grammars = true};

// The tokens in assistant messages stay tokens: those in user messages become text.
json kimi_chat(const std::string& text, const json& more) {
  json body = {{"messages", {{{"role", "assistant"}, {"content", text}}}}};
  body.update(more);
  return body;
}

TEST(CallSyntax, KimiNamesItsCalls) {
  TestServer s(kKimi);
  const std::string text =
      "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:3<|tool_call_argument_begin|>"
      "{\"x\": 1}<|tool_call_end|><|tool_call_begin|>functions.wait:4<|tool_call_argument_begin|>{}"
      "<|tool_call_end|><|tool_calls_section_end|>";
  const json whole = choice(s, kimi_chat(text, tools()));
  EXPECT_FALSE(s.engine.last_request().sampling.skip_special_tokens);
  EXPECT_EQ(whole["finish_reason"], "tool_calls");
  EXPECT_EQ(whole["message"]["reasoning_content"], "Hm.") << "calls end reasoning";
  ASSERT_EQ(whole["message"]["tool_calls"].size(), 2u);
  EXPECT_EQ(whole["message"]["tool_calls"][0]["id"], "functions.look:3");
  EXPECT_EQ(whole["message"]["tool_calls"][1]["function"], (json{{"name", "wait"}, {"arguments", "{}"}}));
  const json stream = collected(s, kimi_chat(text, tools()));
  EXPECT_EQ(stream["reasoning_content"], "Hm.");
  EXPECT_EQ(stream["tool_calls"],
            json::parse(R"([{"name":"look","arguments":"{\"x\": 1}","id":"functions.look:3"},
    {"name":"wait","arguments":"{}","id":"functions.wait:4"}])"));
}

TEST(CallSyntax, KimiKeepsItsIdsInOtherApis) {
  TestServer s(kKimi);
  const std::string text =
      "<|tool_call_begin|>functions.look:3<|tool_call_argument_begin|>{\"x\":1}<|tool_call_end|>";
  const json schema = {{"type", "object"}};
  const HttpAnswer message = http_post(
      s.port, "/v1/messages",
      json{{"model", "fake"},
           {"max_tokens", 999},
           {"tools", {{{"name", "look"}, {"input_schema", schema}}}},
           {"messages", {{{"role", "user"}, {"content", ""}}, {{"role", "assistant"}, {"content", text}}}}}
          .dump());
  ASSERT_EQ(message.status, 200) << message.body;
  const json block = json::parse(message.body)["content"][0];
  EXPECT_EQ(block["id"], "functions.look:3");
  EXPECT_EQ(block["input"], (json{{"x", 1}}));
  const HttpAnswer response =
      http_post(s.port, "/v1/responses",
                json{{"tools", {{{"type", "function"}, {"name", "look"}, {"parameters", schema}}}},
                     {"input", {{{"role", "assistant"}, {"content", text}}}}}
                    .dump());
  ASSERT_EQ(response.status, 200) << response.body;
  const json item = json::parse(response.body)["output"][0];
  EXPECT_EQ(item["call_id"], "functions.look:3");
  EXPECT_EQ(item["name"], "look");
}

TEST(CallSyntax, ForcedKimiCallsUseItsTokens) {
  TestServer s(kKimi);
  choice(s, chat("x", tools({{"tool_choice", "required"}})));
  const json format = json::parse(s.engine.last_request().sampling.grammar.text)["format"]["elements"][1];
  ASSERT_EQ(format["elements"].size(), 4u) << format;
  EXPECT_EQ(format["elements"][0], (json{{"type", "token"}, {"token", 257}}));
  const json& call = format["elements"][1]["elements"][0]["elements"];
  ASSERT_EQ(call.size(), 6u) << format;
  EXPECT_EQ(call[0], (json{{"type", "token"}, {"token", 258}}));
  EXPECT_EQ(call[1]["value"], "functions.look:");
  EXPECT_EQ(call[2]["type"], "regex");
  EXPECT_EQ(call[3], (json{{"type", "token"}, {"token", 259}}));
  EXPECT_EQ(call[4]["json_schema"]["properties"]["x"]["type"], "integer");
  EXPECT_EQ(call[5], (json{{"type", "token"}, {"token", 260}}));
  EXPECT_EQ(format["elements"][2]["type"], "star");
}

// Else the parser would end the reasoning where the grammar does not.
TEST(CallSyntax, ForcedKimiCallsDoNotBeginInsideReasoning) {
  FakeOptions options = kKimi;
  options.special_tokens.push_back("</think>");  // 262
  TestServer s(options);
  choice(s, chat("x", tools({{"tool_choice", "required"}})));
  const json think = json::parse(s.engine.last_request().sampling.grammar.text)["format"]["elements"][0];
  EXPECT_EQ(think["content"]["elements"][1]["exclude_tokens"], (json{262, 257, 256})) << think;
}

}  // namespace
}  // namespace fp4moe
