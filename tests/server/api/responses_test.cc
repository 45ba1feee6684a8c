// POST /v1/responses. The fake engine's output is its prompt: the messages' contents, concatenated.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "server/api/responses_requests.h"

namespace fp4moe {
namespace {

using nlohmann::json;

const FakeOptions kHarmony{.chat_template = "{{ tools }}<|channel|> developer message.thinking",
                           .special_tokens = {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"},
                           .has_grammars = true};
const std::string kCall = R"(<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>)";
std::vector<std::string> types(const std::vector<json>& events) {
  std::vector<std::string> list;
  for (const json& event : events) {
    std::string type = event["type"];
    type.erase(0, std::string("response.").size());
    if (list.empty() || list.back() != type) list.push_back(type);
  }
  return list;
}

TEST(Responses, AnswerAText) {
  TestServer s;
  const json response = respond(s, input("Hello", {{"model", "fake"}, {"metadata", {{"a", "b"}}}}));
  EXPECT_EQ(response["id"].get<std::string>().substr(0, 5), "resp_");
  EXPECT_EQ(response["object"], "response");
  EXPECT_EQ(response["status"], "completed");
  EXPECT_EQ(response["model"], "fake");
  EXPECT_EQ(response["error"], nullptr);
  EXPECT_EQ(response["incomplete_details"], nullptr);
  EXPECT_EQ(response["metadata"], (json{{"a", "b"}}));
  EXPECT_EQ(response["tools"], json::array());
  EXPECT_EQ(response["tool_choice"], "auto");
  EXPECT_EQ(response["text"], json::parse(R"({"format":{"type":"text"}})"));
  EXPECT_GE(response["completed_at"], response["created_at"]);
  ASSERT_EQ(response["output"].size(), 1u);
  const json& message = response["output"][0];
  EXPECT_EQ(message["id"].get<std::string>().substr(0, 4), "msg_");
  EXPECT_EQ(message["type"], "message");
  EXPECT_EQ(message["role"], "assistant");
  EXPECT_EQ(message["status"], "completed");
  EXPECT_EQ(message["content"],
            json::parse(R"([{"type":"output_text","text":"Hello","annotations":[],"logprobs":[]}])"));
  EXPECT_EQ(response["usage"], json::parse(R"({"input_tokens":5,"input_tokens_details":{"cached_tokens":4,
      "cache_write_tokens":0},"output_tokens":6,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":11})"));
  EXPECT_EQ(s.engine.last_request().id, response["id"]);
}

TEST(Responses, ReadMessagesInEveryForm) {
  TestServer s;
  const json parts = {{{"type", "input_text"}, {"text", "a"}}, {{"type", "input_text"}, {"text", "b"}}};
  const json said = {{{"type", "output_text"}, {"text", "c"}, {"annotations", json::array()}}};
  const json messages = messages_of(s, input({{{"role", "user"}, {"content", "x"}},
                                              {{"type", "message"},
                                               {"role", "assistant"},
                                               {"id", "msg_1"},
                                               {"status", "completed"},
                                               {"content", said}},
                                              {{"type", "message"},
                                               {"role", "assistant"},
                                               {"content", {{{"type", "refusal"}, {"refusal", "no"}}}}},
                                              {{"type", "message"}, {"role", "user"}, {"content", parts}}}));
  EXPECT_EQ(messages, json::parse(R"([{"role":"user","content":"x"},{"role":"assistant","content":"c"},
                                      {"role":"assistant","content":"no"},{"role":"user","content":"a b"}])"));
}

TEST(Responses, JoinTheFirstSystemTexts) {
  TestServer s;
  const json messages = messages_of(s, input({{{"role", "developer"}, {"content", "B"}},
                                              {{"role", "system"}, {"content", "C"}},
                                              {{"role", "user"}, {"content", "x"}},
                                              {{"role", "developer"}, {"content", "D"}}},
                                             {{"instructions", "A"}}));
  EXPECT_EQ(messages, json::parse(R"([{"role":"system","content":"A\n\nB\n\nC"},{"role":"user","content":"x"},
                                      {"role":"system","content":"D"}])"));
}

const json kHistory = json::parse(R"([
    {"role": "user", "content": "q"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": "I look."},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{\"x\":1}"},
    {"type": "function_call", "call_id": "c2", "name": "wait", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"},
    {"role": "user", "content": "and?"}])");

TEST(Responses, ReadCallsAndReasoning) {
  TestServer s(kHermes);
  const json messages = messages_of(s, input(kHistory));
  ASSERT_EQ(messages.size(), 5u);
  EXPECT_EQ(messages[1]["content"], "I look.");
  EXPECT_EQ(messages[1]["reasoning_content"], "hm");
  ASSERT_EQ(messages[1]["tool_calls"].size(), 2u);
  EXPECT_EQ(messages[1]["tool_calls"][0], json::parse(R"({"id":"c1","type":"function",
      "function":{"name":"look","arguments":{"x":1}}})"));
  EXPECT_EQ(messages[2], json::parse(R"({"role":"tool","tool_call_id":"c1","content":"seen"})"));
  EXPECT_EQ(messages[3]["content"], "done");
  EXPECT_EQ(messages[4], json::parse(R"({"role":"user","content":"and?"})"));
}

TEST(Responses, SplitTextAndCallsForHarmony) {
  TestServer s(kHarmony);
  const json messages = messages_of(s, input(kHistory));
  ASSERT_EQ(messages.size(), 6u);
  EXPECT_EQ(messages[1]["thinking"], "hm");
  EXPECT_FALSE(messages[1].contains("tool_calls"));
  EXPECT_EQ(messages[2]["content"], "");
  EXPECT_EQ(messages[2]["tool_calls"].size(), 2u);
}

TEST(Responses, ReturnReasoningTextAndCalls) {
  TestServer s(kHermes);
  const json body = input("<think>Hm.</think>I look." + kCall + kCall, {{"tools", kTools}});
  const json response = respond(s, body);
  const json& output = response["output"];
  ASSERT_EQ(output.size(), 4u) << output;
  EXPECT_EQ(output[0]["type"], "reasoning");
  EXPECT_EQ(output[0]["content"], json::parse(R"([{"type":"reasoning_text","text":"Hm."}])"));
  EXPECT_EQ(output[0]["summary"], json::array());
  EXPECT_EQ(text_of(response), "I look.");
  EXPECT_EQ(output[2]["type"], "function_call");
  EXPECT_EQ(output[2]["name"], "look");
  EXPECT_EQ(output[2]["arguments"], R"({"x": 1})");
  EXPECT_EQ(output[2]["call_id"].get<std::string>().substr(0, 5), "call_");
  EXPECT_EQ(output[2]["id"].get<std::string>().substr(0, 3), "fc_");
  EXPECT_NE(output[2]["call_id"], output[3]["call_id"]);
  EXPECT_EQ(response["usage"]["output_tokens_details"]["reasoning_tokens"], 3);
  EXPECT_EQ(response["tools"], kTools);
  json one = body;
  one["parallel_tool_calls"] = false;
  EXPECT_EQ(respond(s, one)["output"].size(), 3u);
  one["separate_reasoning"] = false;
  EXPECT_EQ(respond(s, one)["output"][0]["type"], "message");
}

TEST(Responses, StreamNamedEvents) {
  TestServer s(kHermes);
  const json body = input("<think>Hm.</think>I look." + kCall, {{"tools", kTools}});
  const std::vector<json> events = stream(s, body);
  EXPECT_EQ(types(events),
            (std::vector<std::string>{
                "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
                "reasoning_text.done", "content_part.done", "output_item.done", "output_item.added",
                "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
                "output_item.done", "output_item.added", "function_call_arguments.delta",
                "function_call_arguments.done", "output_item.done", "completed"}));
  EXPECT_EQ(events[0]["response"]["status"], "in_progress");
  EXPECT_EQ(events[0]["response"]["output"], json::array());
  std::map<size_t, std::string> texts;
  for (const json& event : events)
    if (event.contains("delta")) texts[event["output_index"]] += event["delta"];
  EXPECT_EQ(texts[0], "Hm.");
  EXPECT_EQ(texts[1], "I look.");
  EXPECT_EQ(texts[2], R"({"x": 1})");
  for (const json& event : events) {
    if (event["type"] != "response.output_item.done") continue;
    EXPECT_EQ(event["item"], events.back()["response"]["output"][event["output_index"].get<size_t>()]);
  }
}

TEST(Responses, AreTheSameAsTheirStreams) {
  TestServer s(kHermes);
  const auto without_ids = [](json response) {
    for (const char* name : {"id", "created_at", "completed_at"}) response.erase(name);
    for (json& item : response["output"]) item.erase("id"), item.erase("call_id");
    return response;
  };
  for (const json& more :
       {json::object(), json{{"max_output_tokens", 20}}, json{{"stop", "l"}}, json{{"top_logprobs", 1}}}) {
    json body = input("<think>Hm.</think>I look." + kCall, {{"tools", kTools}});
    body.update(more);
    EXPECT_EQ(without_ids(stream(s, body).back()["response"]), without_ids(respond(s, body))) << more;
  }
}

TEST(Responses, EndEarlyAtTheTokenLimit) {
  TestServer s;
  const json response = respond(s, input("Hello", {{"max_output_tokens", 2}}));
  EXPECT_EQ(response["status"], "incomplete");
  EXPECT_EQ(response["incomplete_details"], (json{{"reason", "max_output_tokens"}}));
  EXPECT_EQ(response["output"][0]["status"], "incomplete");
  EXPECT_EQ(response["max_output_tokens"], 2);
  EXPECT_EQ(stream(s, input("Hello", {{"max_output_tokens", 2}})).back()["type"], "response.incomplete");
}

TEST(Responses, FailInAStream) {
  TestServer s;
  const std::vector<json> events = stream(s, input("FAIL"));
  EXPECT_EQ(events.front()["type"], "response.created");
  EXPECT_EQ(events.back()["type"], "response.failed");
  EXPECT_EQ(events.back()["response"]["status"], "failed");
  EXPECT_EQ(events.back()["response"]["error"],
            (json{{"code", "server_error"}, {"message", "asked to fail"}}));
  EXPECT_EQ(refused(s, input("FAIL"), 500)["message"], "asked to fail");
  EXPECT_EQ(refused(s, input("WAITED", {{"stream", true}}), 503)["message"],
            "waited");  // before the first event
}

TEST(Responses, ReturnLogprobsOfTheText) {
  TestServer s(kHarmony);
  const std::string said =
      "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>ab€";
  // Special tokens in an assistant's message stay special; the last message continues it.
  const json body = input({{{"role", "assistant"}, {"content", said}}},
                          {{"include", {"message.output_text.logprobs"}}, {"top_logprobs", 2}});
  const json response = respond(s, body);
  EXPECT_EQ(text_of(response), "ab€");
  const json& logprobs = response["output"][1]["content"][0]["logprobs"];
  ASSERT_EQ(logprobs.size(), 5u) << logprobs;  // the bytes of the text
  EXPECT_EQ(logprobs[0]["token"], "a");
  EXPECT_EQ(logprobs[0]["top_logprobs"].size(), 2u);
  EXPECT_EQ(response["usage"]["output_tokens_details"]["reasoning_tokens"], 2);
  size_t streamed = 0;
  for (const json& event : stream(s, body))
    if (event["type"] == "response.output_text.delta") streamed += event["logprobs"].size();
  EXPECT_EQ(streamed, 5u);
}

TEST(Responses, TranslateTools) {
  TestServer s(kHermes);
  respond(s, input("x", {{"tools", kTools}}));
  const json tools = json::parse(s.engine.last_options().tools_json);
  ASSERT_EQ(tools.size(), 2u);
  EXPECT_EQ(tools[0]["function"]["name"], "look");
  EXPECT_EQ(tools[0]["function"]["description"], "Looks.");
  respond(s, input("x", {{"tools", kTools}, {"tool_choice", "none"}}));
  EXPECT_EQ(s.engine.last_options().tools_json, "");
  const auto grammar = [&](const json& choice) {
    const json response = respond(s, input("x", {{"tools", kTools}, {"tool_choice", choice}}));
    EXPECT_EQ(response["tool_choice"], choice);
    return s.engine.last_request().sampling.grammar.text;
  };
  const std::string both = grammar("required"), one = grammar({{"type", "function"}, {"name", "wait"}});
  EXPECT_NE(both.find("look"), std::string::npos);
  EXPECT_EQ(one.find("look"), std::string::npos);
  EXPECT_NE(one.find("wait"), std::string::npos);
  const json only_wait = {{{"type", "function"}, {"name", "wait"}}};
  EXPECT_EQ(grammar({{"type", "allowed_tools"}, {"mode", "auto"}, {"tools", only_wait}}), "");
  EXPECT_EQ(json::parse(s.engine.last_options().tools_json).size(), 1u);
  EXPECT_EQ(grammar({{"type", "allowed_tools"}, {"mode", "required"}, {"tools", only_wait}}).find("look"),
            std::string::npos);
}

TEST(Responses, TruncateNothing) {
  TestServer s;
  EXPECT_EQ(respond(s, input("x", {{"truncation", "auto"}}))["truncation"], "disabled");
  EXPECT_EQ(respond(s, input("x", {{"truncation", "disabled"}}))["truncation"], "disabled");
}

TEST(Responses, TranslateTextFormatAndReasoning) {
  using Kind = GrammarSpec::Kind;
  TestServer s({.has_grammars = true});
  respond(s, input("x", {{"text", {{"format", {{"type", "json_object"}}}, {"verbosity", "low"}}}}));
  EXPECT_EQ(s.engine.last_request().sampling.grammar,
            (GrammarSpec{Kind::kJsonSchema, R"({"type":"object"})"}));
  const json format = {
      {"type", "json_schema"}, {"name", "n"}, {"strict", true}, {"schema", {{"type", "null"}}}};
  const json response = respond(s, input("x", {{"text", {{"format", format}}}}));
  EXPECT_EQ(s.engine.last_request().sampling.grammar, (GrammarSpec{Kind::kJsonSchema, R"({"type":"null"})"}));
  EXPECT_EQ(response["text"]["format"], format);
  const json reasoned = respond(s, input("x", {{"reasoning", {{"effort", "low"}, {"summary", "auto"}}}}));
  EXPECT_EQ(s.engine.last_options().kwargs_json, R"({"reasoning_effort":"low"})");
  EXPECT_EQ(reasoned["reasoning"]["effort"], "low");
}

TEST(Responses, TakeSamplingFieldsOfChat) {
  TestServer s({.has_grammars = true});
  const json response = respond(s, input("x", {{"temperature", 0.7},
                                               {"top_p", 0.95},
                                               {"top_k", 5},
                                               {"min_p", 0.1},
                                               {"repetition_penalty", 1.2},
                                               {"seed", 42},
                                               {"stop", {"END"}},
                                               {"ignore_eos", true},
                                               {"regex", "a+"},
                                               {"max_output_tokens", 3},
                                               {"chat_template_kwargs", {{"a", 1}}},
                                               {"rid", "mine"},
                                               {"timeout", 5}}));
  const Request request = s.engine.last_request();
  EXPECT_FLOAT_EQ(request.sampling.temperature, 0.7f);
  EXPECT_EQ(request.sampling.top_k, 5);
  EXPECT_EQ(request.sampling.seed, 42u);
  EXPECT_EQ(request.sampling.stop, std::vector<std::string>{"END"});
  EXPECT_TRUE(request.sampling.ignore_eos);
  EXPECT_EQ(request.sampling.grammar.text, "a+");
  EXPECT_EQ(request.sampling.max_new_tokens, 3);
  EXPECT_EQ(request.id, "mine");
  EXPECT_EQ(request.timeout_seconds, 5);
  EXPECT_EQ(s.engine.last_options().kwargs_json, R"({"a":1})");
  EXPECT_EQ(response["temperature"], 0.7);
  EXPECT_EQ(response["top_p"], 0.95);
}

TEST(Responses, NameTheWrongItem) {
  const auto item = [](const json& one) { return input({{{"role", "user"}, {"content", "a"}}, one}); };
  expect_named(
      {{json::object(), "input"},
       {input(7), "input"},
       {input(json::array()), "input"},
       {input({7}), "input[0]"},
       {item({{"role", "robot"}, {"content", "a"}}), "input[1].role"},
       {item({{"role", "user"}}), "input[1].content"},
       {item({{"role", "user"}, {"content", 7}}), "input[1].content"},
       {item({{"role", "user"}, {"content", {7}}}), "input[1].content[0]"},
       {item({{"role", "user"}, {"content", {{{"type", "input_image"}, {"image_url", "u"}}}}}),
        "input[1].content[0].type"},
       {item({{"role", "user"}, {"content", {{{"type", "input_file"}}}}}), "input[1].content[0].type"},
       {item({{"role", "user"}, {"content", {{{"type", "input_text"}}}}}), "input[1].content[0].text"},
       {item({{"type", "computer_call"}}), "input[1].type"},
       {item({{"type", 7}}), "input[1].type"},
       {item({{"type", "function_call"}, {"call_id", "c"}, {"name", "f"}}), "input[1].arguments"},
       {item({{"type", "function_call"}, {"call_id", 7}, {"name", "f"}, {"arguments", ""}}),
        "input[1].call_id"},
       {item({{"type", "function_call_output"}, {"call_id", "c"}, {"output", "o"}}), "input[1].call_id"},
       {item({{"type", "reasoning"}, {"content", "a"}, {"summary", 7}}), "input[1].summary"},
       {item({{"role", "user"}, {"content", "a"}, {"id", std::string(257, 'a')}}), "input[1].id"}});
}

TEST(Responses, NameTheWrongField) {
  const json schema = {{"type", "json_schema"}, {"name", "n"}};
  expect_named(
      {{input("a", {{"instructions", 7}}), "instructions"},
       {input("a", {{"tools", 7}}), "tools"},
       {input("a", {{"tools", {{{"type", "code_interpreter"}}}}}), "tools[0].type"},
       {input("a", {{"tools", {{{"type", "tool_search"}}}}}), "tools[0].type"},
       {input("a", {{"tools", {{{"type", 7}}}}}), "tools[0].type"},
       {input("a", {{"tools", {7}}}), "tools[0]"},
       {input("a", {{"tools", {{{"type", "web_search"}}}}, {"tool_choice", "required"}}), "tool_choice"},
       {input("a", {{"tools", {{{"type", "custom"}, {"name", "f"}}}}}), "tools[0].type"},
       {input("a", {{"tools", {{{"type", "function"}}}}}), "tools[0].name"},
       {input("a", {{"tools", {{{"type", "function"}, {"name", "a b"}}}}}), "tools[0].name"},
       {input("a", {{"tools", {{{"type", "function"}, {"name", "f"}, {"parameters", 7}}}}}),
        "tools[0].parameters"},
       {input("a", {{"tools", kTools}, {"tool_choice", 7}}), "tool_choice"},
       {input("a", {{"tool_choice", "required"}}), "tool_choice"},
       {input("a", {{"tools", kTools}, {"tool_choice", {{"type", "mcp"}}}}), "tool_choice.type"},
       {input("a", {{"tools", kTools}, {"tool_choice", {{"type", "function"}, {"name", "g"}}}}),
        "tool_choice.name"},
       {input("a", {{"tools", kTools}, {"tool_choice", {{"type", "allowed_tools"}}}}), "tool_choice.tools"},
       {input("a", {{"tools", kTools},
                    {"tool_choice",
                     {{"type", "allowed_tools"}, {"tools", {{{"type", "function"}, {"name", "g"}}}}}}}),
        "tool_choice.tools[0].name"},
       {input("a", {{"text", 7}}), "text"},
       {input("a", {{"text", {{"format", {{"type", "xml"}}}}}}), "text.format.type"},
       {input("a", {{"text", {{"format", schema}}}}), "text.format.schema"},
       {input("a", {{"text", {{"verbosity", "loud"}}}}), "text.verbosity"},
       {input("a", {{"regex", "a"}, {"text", {{"format", {{"type", "json_object"}}}}}}), "text.format"},
       {input("a", {{"reasoning", {{"effort", 7}}}}), "reasoning.effort"},
       {input("a", {{"reasoning", {{"summary", "long"}}}}), "reasoning.summary"},
       {input("a", {{"include", {"file_search_call.results"}}}), "include"},
       {input("a", {{"top_logprobs", 21}}), "top_logprobs"},
       {input("a", {{"max_output_tokens", -1}}), "max_output_tokens"},
       {input("a", {{"max_tool_calls", 0}}), "max_tool_calls"},
       {input("a", {{"temperature", 1000}}), "temperature"},
       {input("a", {{"background", true}}), "background"},
       {input("a", {{"truncation", "middle"}}), "truncation"},
       {input("a", {{"truncation", true}}), "truncation"},
       {input("a", {{"enable_response_messages", true}}), "enable_response_messages"},
       {input("a", {{"previous_input_messages", json::array()}}), "previous_input_messages"},
       {input("a", {{"conversation", "conv_1"}}), "conversation"},
       {input("a", {{"prompt", {{"id", "p"}}}}), "prompt"},
       {input("a", {{"metadata", {{"a", 7}}}}), "metadata"},
       {input("a", {{"store", "yes"}}), "store"},
       {input("a", {{"stream", 1}}), "stream"}});
  TestServer s({.context_length = 200});
  for (const char* truncation : {"auto", "disabled"})
    EXPECT_EQ(refused(s, input(std::string(300, 'a'), {{"truncation", truncation}}))["code"],
              "context_length_exceeded");
  const json many = refused(s, input(json(201, {{"role", "user"}, {"content", "a"}})));
  EXPECT_EQ(many["code"], "context_length_exceeded");
  EXPECT_EQ(many["param"], "input");
  EXPECT_EQ(refused(s, input("a", {{"model", "other"}}), 404)["param"], "model");
}

TEST(Responses, WarnOfUnknownFieldsOnly) {
  TestServer s(kHermes);
  respond(s, input(kHistory, {{"tools", kTools},
                              {"user", "u"},
                              {"service_tier", "auto"},
                              {"prompt_cache_key", "k"},
                              {"safety_identifier", "s"},
                              {"client_metadata", {{"a", "b"}}},
                              {"store", false},
                              {"top_logprobs", 0},
                              {"stream_options", {{"include_obfuscation", false}}},
                              {"include", {"reasoning.encrypted_content"}},
                              {"max_tool_calls", 3},
                              {"text", {{"verbosity", "low"}}},
                              {"reasoning", {{"effort", "low"}}}}));
  for (const std::string& line : s.log()) EXPECT_EQ(line.find("unknown"), std::string::npos) << line;
  respond(s, input("x", {{"messages", json::array()}}));
  const std::vector<std::string> log = s.log();
  EXPECT_TRUE(std::any_of(log.begin(), log.end(), [](const std::string& line) {
    return line == "/v1/responses: unknown field messages is ignored";
  }));
}

}  // namespace
}  // namespace fp4moe
