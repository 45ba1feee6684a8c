// /v1/chat/completions, field by field, over a real socket.
#include "server/api/openai_requests.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;

TEST(Chat, WholeAnswer) {
  TestServer s;
  const HttpAnswer answer = http_post(s.port, kChat, chat("hello"));
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.headers.at("content-type"), "application/json");
  const json body = body_of(answer);
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["id"].get<std::string>().rfind("chatcmpl-", 0), 0u);
  EXPECT_EQ(body["model"], "fake");
  const json& choice = body["choices"][0];
  EXPECT_EQ(choice["message"]["role"], "assistant");
  EXPECT_EQ(choice["message"]["content"], "hello");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["matched_stop"], FakeEngine::kEnd);
  EXPECT_TRUE(choice["logprobs"].is_null());
  EXPECT_EQ(body["usage"], (json{{"prompt_tokens", 5},
                                 {"completion_tokens", 6},
                                 {"total_tokens", 11},
                                 {"prompt_tokens_details", {{"cached_tokens", 4}}},
                                 {"completion_tokens_details", {{"reasoning_tokens", 0}}}}));
}

TEST(Chat, StreamHasRoleTextFinishUsageAndDone) {
  TestServer s;
  const HttpAnswer answer =
      http_post(s.port, kChat, chat("ab", R"(,"stream":true,"stream_options":{"include_usage":true})"));
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.headers.at("content-type"), "text/event-stream; charset=utf-8");
  const auto events = parse_events(answer.body);
  ASSERT_EQ(events.size(), 6u) << answer.body;
  EXPECT_EQ(events[0]["object"], "chat.completion.chunk");
  EXPECT_EQ(events[0]["choices"][0]["delta"],
            (json{{"role", "assistant"}, {"content", ""}, {"reasoning_content", nullptr}}));
  EXPECT_EQ(events[1]["choices"][0]["delta"], (json{{"content", "a"}, {"reasoning_content", nullptr}}));
  EXPECT_TRUE(events[1]["choices"][0]["finish_reason"].is_null());
  EXPECT_TRUE(events[1]["usage"].is_null());
  EXPECT_EQ(events[2]["choices"][0]["delta"], (json{{"content", "b"}, {"reasoning_content", nullptr}}));
  EXPECT_EQ(events[3]["choices"][0]["delta"], (json{{"reasoning_content", nullptr}}));
  EXPECT_EQ(events[3]["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(events[4]["choices"], json::array());
  EXPECT_EQ(events[4]["usage"]["total_tokens"], 5);
  EXPECT_EQ(events[5], "[DONE]");
  for (size_t i = 1; i < 5; ++i) EXPECT_EQ(events[i]["id"], events[0]["id"]);
}

TEST(Chat, StreamWithoutUsageHasNoUsageField) {
  TestServer s;
  const auto events = parse_events(http_post(s.port, kChat, chat("a", R"(,"stream":true)")).body);
  ASSERT_EQ(events.size(), 4u);
  for (size_t i = 0; i < 3; ++i) EXPECT_FALSE(events[i].contains("usage"));
}

TEST(Chat, StreamAndWholeAgree) {
  TestServer s;
  const std::string text = "gr\xC3\xBC\xC3\x9F \xE2\x82\xAC";
  const json whole = body_of(http_post(s.port, kChat, chat(text)));
  std::string streamed;
  for (const json& event : parse_events(http_post(s.port, kChat, chat(text, R"(,"stream":true)")).body)) {
    if (event.is_object()) streamed += event["choices"][0]["delta"].value("content", "");
  }
  EXPECT_EQ(whole["choices"][0]["message"]["content"], text);
  EXPECT_EQ(streamed, text);
}

TEST(Chat, SamplingFieldsReachTheEngine) {
  TestServer s;
  const std::string more =
      R"(,"temperature":0.5,"top_p":0.25,"top_k":7,"seed":-1,"stop":["x","y"],"max_tokens":9,)"
      R"("stop_token_ids":[5],"ignore_eos":true,"skip_special_tokens":false,"no_stop_trim":true,)"
      R"("min_p":0.125,"frequency_penalty":-1.5,"presence_penalty":2,"repetition_penalty":1.25,)"
      R"("logit_bias":{"5":1,"250":-100},"min_tokens":3,"stop_regex":"[0-9]+")";
  ASSERT_EQ(http_post(s.port, kChat, chat("hello", more)).status, 200);
  const SamplingParams p = s.engine.last_request().sampling;
  EXPECT_EQ(p.temperature, 0.5f);
  EXPECT_EQ(p.top_p, 0.25f);
  EXPECT_EQ(p.top_k, 7);
  EXPECT_EQ(p.seed, UINT64_MAX);
  EXPECT_EQ(p.stop, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(p.stop_token_ids, std::vector<int32_t>{5});
  EXPECT_EQ(p.max_new_tokens, 9);
  EXPECT_TRUE(p.ignore_eos);
  EXPECT_FALSE(p.skip_special_tokens);
  EXPECT_TRUE(p.no_stop_trim);
  EXPECT_EQ(p.min_p, 0.125f);
  EXPECT_EQ(p.frequency_penalty, -1.5f);
  EXPECT_EQ(p.presence_penalty, 2.0f);
  EXPECT_EQ(p.repetition_penalty, 1.25f);
  ASSERT_EQ(p.logit_bias.size(), 2u);
  EXPECT_EQ(p.logit_bias[1].token_id, 250);
  EXPECT_EQ(p.logit_bias[1].bias, -100.0f);
  EXPECT_EQ(p.min_new_tokens, 3);
  EXPECT_EQ(p.stop_regex, std::vector<std::string>{"[0-9]+"});
  EXPECT_EQ(p.top_logprobs, -1);
}

TEST(Chat, DefaultsAreTheModels) {
  TestServer s;
  ASSERT_EQ(http_post(s.port, kChat, chat("hello", R"(,"temperature":null)")).status, 200);
  const SamplingParams p = s.engine.last_request().sampling;
  EXPECT_EQ(p.temperature, 0.0f);
  EXPECT_EQ(p.max_new_tokens, s.engine.info().context_length);
  EXPECT_FALSE(p.seed.has_value());
}

TEST(Chat, MaxCompletionTokensWinsOverMaxTokens) {
  TestServer s;
  const json body =
      body_of(http_post(s.port, kChat, chat("hello", R"(,"max_tokens":4,"max_completion_tokens":2)")));
  EXPECT_EQ(body["choices"][0]["message"]["content"], "he");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
}

TEST(Chat, StopStringIsCutAndNamed) {
  TestServer s;
  const json body = body_of(http_post(s.port, kChat, chat("abc", R"(,"stop":"b")")));
  EXPECT_EQ(body["choices"][0]["message"]["content"], "a");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(body["choices"][0]["matched_stop"], "b");
}

TEST(Chat, Logprobs) {
  TestServer s;
  const std::string more = R"(,"logprobs":true,"top_logprobs":2,"max_tokens":1)";
  const json body = body_of(http_post(s.port, kChat, chat("z", more)));
  const json& content = body["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 1u);
  EXPECT_EQ(content[0]["token"], "z");
  EXPECT_EQ(content[0]["logprob"], -0.5);
  EXPECT_EQ(content[0]["bytes"], json::array({'z'}));
  ASSERT_EQ(content[0]["top_logprobs"].size(), 2u);
  EXPECT_EQ(content[0]["top_logprobs"][1]["token"], "b");
  const auto events = parse_events(http_post(s.port, kChat, chat("z", more + ",\"stream\":true")).body);
  EXPECT_EQ(events[1]["choices"][0]["logprobs"]["content"], content);
}

TEST(Chat, LogprobsOfBytesThatAreNoCharacter) {
  TestServer s;
  const HttpAnswer answer = http_post(s.port, kChat, chat("\xC3\xBC", R"(,"logprobs":true)"));
  ASSERT_EQ(answer.status, 200);
  const json content = body_of(answer)["choices"][0]["logprobs"]["content"];
  EXPECT_EQ(content[0]["token"], "\xEF\xBF\xBD");
  EXPECT_EQ(content[0]["bytes"], json::array({0xC3}));
}

TEST(Chat, SeveralChoicesCountThePromptOnce) {
  TestServer s;
  const json body = body_of(http_post(s.port, kChat, chat("hey", R"(,"n":3,"seed":10)")));
  ASSERT_EQ(body["choices"].size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(body["choices"][i]["index"], i);
    EXPECT_EQ(body["choices"][i]["message"]["content"], "hey");
  }
  EXPECT_EQ(body["usage"]["prompt_tokens"], 3);
  EXPECT_EQ(body["usage"]["completion_tokens"], 12);
  EXPECT_EQ(s.engine.last_request().sampling.seed, 12u);
}

TEST(Chat, ContentPartsToolsAndTemplateArguments) {
  TestServer s(FakeOptions{.chat_template = "{{ tools }}"});
  const std::string body =
      R"({"messages":[{"role":"system","content":null},{"role":"user","content":[{"type":"text","text":"a"},)"
      R"({"type":"text","text":"b"}]},{"role":"assistant","content":"c","tool_calls":[{"type":"function",)"
      R"("function":{"name":"f","arguments":"{\"x\":1}"}}]}],"tools":[{"z":1,"type":"function",)"
      R"("function":{"name":"f"}}],)"
      R"("chat_template_kwargs":{"thinking":true},"reasoning_effort":"low","max_tokens":1})";
  const HttpAnswer answer = http_post(s.port, kChat, body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  const json messages = json::parse(s.engine.last_messages());
  EXPECT_EQ(messages[0]["content"], "");
  EXPECT_EQ(messages[1]["content"], "a b");
  EXPECT_EQ(messages[2]["tool_calls"][0]["function"]["arguments"], (json{{"x", 1}}));
  EXPECT_EQ(s.engine.last_options().tools_json,
            R"([{"z":1,"type":"function","function":{"name":"f"}}])");  // keys keep their order
  EXPECT_EQ(s.engine.last_options().kwargs_json, R"({"thinking":true,"reasoning_effort":"low"})");
  EXPECT_TRUE(s.engine.last_options().add_generation_prompt);
}

struct Wrong {
  const char* name;
  const char* more;  // fields besides messages
  const char* param;
};
class WrongChatField : public testing::TestWithParam<Wrong> {};

TEST_P(WrongChatField, IsRefusedByName) {
  TestServer s;
  const HttpAnswer answer = http_post(s.port, kChat, chat("x", std::string(",") + GetParam().more));
  ASSERT_EQ(answer.status, 400) << answer.body;
  const json error = body_of(answer)["error"];
  EXPECT_EQ(error["type"], "invalid_request_error");
  EXPECT_EQ(error["param"], GetParam().param);
  EXPECT_NE(error["message"].get<std::string>().find(GetParam().param), std::string::npos) << error;
  EXPECT_EQ(s.engine.stats().num_requests_total, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Fields, WrongChatField,
    testing::Values(
        Wrong{"TextTemperature", R"("temperature":"hot")", "temperature"},
        Wrong{"NegativeTemperature", R"("temperature":-1)", "temperature"},
        Wrong{"HugeTemperature", R"("temperature":1e30)", "temperature"},
        Wrong{"ZeroTopP", R"("top_p":0)", "top_p"}, Wrong{"BigTopP", R"("top_p":2)", "top_p"},
        Wrong{"NegativeTopK", R"("top_k":-2)", "top_k"}, Wrong{"ZeroTopK", R"("top_k":0)", "top_k"},
        Wrong{"NegativeMaxTokens", R"("max_tokens":-1)", "max_tokens"},
        Wrong{"HugeMaxTokens", R"("max_tokens":2147483648)", "max_tokens"},
        Wrong{"FractionMaxTokens", R"("max_tokens":1.5)", "max_tokens"},
        Wrong{"TextMaxCompletionTokens", R"("max_completion_tokens":"9")", "max_completion_tokens"},
        Wrong{"HugeN", R"("n":1000000000)", "n"}, Wrong{"ZeroN", R"("n":0)", "n"},
        Wrong{"HugeSeed", R"("seed":18446744073709551615)", "seed"},
        Wrong{"NumberStop", R"("stop":5)", "stop"}, Wrong{"EmptyStop", R"("stop":[""])", "stop"},
        Wrong{"TextStopIds", R"("stop_token_ids":["a"])", "stop_token_ids"},
        Wrong{"NegativeStopIds", R"("stop_token_ids":[-1])", "stop_token_ids"},
        Wrong{"TextStream", R"("stream":"yes")", "stream"},
        Wrong{"TextStreamOptions", R"("stream_options":"all")", "stream_options"},
        Wrong{"TextIncludeUsage", R"("stream_options":{"include_usage":1})", "stream_options.include_usage"},
        Wrong{"NumberLogprobs", R"("logprobs":3)", "logprobs"},
        Wrong{"ManyTopLogprobs", R"("logprobs":true,"top_logprobs":21)", "top_logprobs"},
        Wrong{"LonelyTopLogprobs", R"("top_logprobs":1)", "top_logprobs"},
        Wrong{"TextTools", R"("tools":"f")", "tools"},
        Wrong{"ForcedTool", R"("tool_choice":"required")", "tool_choice"},
        Wrong{"ListKwargs", R"("chat_template_kwargs":[])", "chat_template_kwargs"},
        Wrong{"BigMinP", R"("min_p":1.5)", "min_p"},
        Wrong{"FrequencyPenalty", R"("frequency_penalty":2.5)", "frequency_penalty"},
        Wrong{"PresencePenalty", R"("presence_penalty":"much")", "presence_penalty"},
        Wrong{"ZeroRepetitionPenalty", R"("repetition_penalty":0)", "repetition_penalty"},
        Wrong{"ListLogitBias", R"("logit_bias":[5])", "logit_bias"},
        Wrong{"WordLogitBias", R"("logit_bias":{"five":1})", "logit_bias.five"},
        Wrong{"NegativeIdLogitBias", R"("logit_bias":{"-5":1})", "logit_bias.-5"},
        Wrong{"HugeIdLogitBias", R"("logit_bias":{"99999999999":1})", "logit_bias.99999999999"},
        Wrong{"BigLogitBias", R"("logit_bias":{"5":101})", "logit_bias.5"},
        Wrong{"NullLogitBias", R"("logit_bias":{"5":null})", "logit_bias.5"},
        Wrong{"TextLogitBias", R"("logit_bias":{"5":"x"})", "logit_bias.5"},
        Wrong{"RoutedExpertsOfTwo", R"("return_routed_experts":true,"n":2)", "return_routed_experts"},
        Wrong{"RoutedExpertsFromFar", R"("return_routed_experts":true,"routed_experts_start_len":99)",
              "routed_experts_start_len"},
        Wrong{"NegativeMinTokens", R"("min_tokens":-1)", "min_tokens"},
        Wrong{"JsonFormat", R"("response_format":{"type":"json_object"})", "response_format"},
        Wrong{"NumberModel", R"("model":5)", "model"}),
    [](const auto& test) { return test.param.name; });

TEST(Chat, TooManyOrTooLongStopsAreRefused) {
  TestServer s;
  json stops = json::array();
  for (int i = 0; i < 10000; ++i) stops.push_back("stop " + std::to_string(i));
  for (const json& stop : {stops, json(std::string(1 << 20, 'x')), json("")}) {
    const HttpAnswer answer = http_post(s.port, kChat, chat("x", ",\"stop\":" + stop.dump()));
    EXPECT_EQ(answer.status, 400);
    EXPECT_EQ(body_of(answer)["error"]["param"], "stop");
    EXPECT_LT(answer.body.size(), 1000u) << "the error repeats the whole input";
  }
  const json most(64, std::string(1024, 'x'));
  EXPECT_EQ(http_post(s.port, kChat, chat("x", ",\"stop\":" + most.dump())).status, 200);
}

TEST(Chat, WrongMessagesAreRefusedByPlace) {
  TestServer s;
  const std::pair<const char*, const char*> cases[] = {
      {R"({})", "messages"},
      {R"({"messages":[]})", "messages"},
      {R"({"messages":"hi"})", "messages"},
      {R"({"messages":[5]})", "messages[0]"},
      {R"({"messages":[{"content":"x"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"user","content":"x"},{"role":"user","content":5}]})", "messages[1].content"},
      {R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})", "messages[0].content[0].type"},
      {R"({"messages":[{"role":"user","content":[{"type":"text"}]}]})", "messages[0].content[0]"},
      {R"({"messages":[{"role":"user","content":""}]})", "messages"},
      {R"({"messages":[{"role":"user","content":"BAD"}]})", "messages"},
      {R"({"messages":[{"role":"bad","content":"x"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"<|im_end|>","content":"x"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"","content":"x"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"User","content":"x"}]})", "messages[0].role"},
      {R"({"messages":[{"role":"user"}]})", "messages[0].content"},
      {R"({"messages":[{"role":"system","content":"x"},{"role":"user","content":null}]})",
       "messages[1].content"},
  };
  for (const auto& [body, param] : cases) {
    const HttpAnswer answer = http_post(s.port, kChat, body);
    EXPECT_EQ(answer.status, 400) << body;
    EXPECT_EQ(body_of(answer)["error"]["param"], param) << body;
  }
}

TEST(Chat, MessagesOfCallsAndResultsNeedNoContent) {
  TestServer s;
  const char* cases[] = {
      R"({"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,)"
      R"("tool_calls":[{"type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool"}]})",
      R"({"messages":[{"role":"user","content":"x"},{"role":"assistant","function_call":{"name":"f",)"
      R"("arguments":"{}"}},{"role":"function","name":"f","content":null}]})",
      R"({"messages":[{"role":"developer","content":"y"},{"role":"assistant","reasoning_content":"z"}]})",
  };
  for (const char* body : cases) EXPECT_EQ(http_post(s.port, kChat, body).status, 200) << body;
}

// Also for models whose checkpoint has a vision part, which is not run.
TEST(Chat, AnImageIsRefusedByName) {
  TestServer s;
  for (const char* type : {"image_url", "input_image", "input_audio", "video_url", "file"}) {
    const std::string body =
        R"({"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":")" + std::string(type) +
        R"(","image_url":{"url":"u"}}]}]})";
    const HttpAnswer answer = http_post(s.port, kChat, body);
    EXPECT_EQ(answer.status, 400);
    const std::string message = body_of(answer)["error"]["message"];
    EXPECT_NE(message.find("\"" + std::string(type) + "\" is not supported"), std::string::npos) << message;
    EXPECT_NE(message.find("reads text only"), std::string::npos) << message;
  }
}

TEST(Chat, NeutralValuesOfUnsupportedFieldsAreAccepted) {
  TestServer s;
  const std::string more =
      R"(,"frequency_penalty":0.0,"presence_penalty":0,"logit_bias":{},"response_format":{"type":"text"},)"
      R"("tool_choice":"auto","min_p":0.0,"repetition_penalty":1.0,"regex":null)";
  const HttpAnswer answer = http_post(s.port, kChat, chat("x", more));
  EXPECT_EQ(answer.status, 200) << answer.body;
}

TEST(Chat, UnknownFieldsWarnOnce) {
  TestServer s;
  for (int i = 0; i < 3; ++i)
    ASSERT_EQ(http_post(s.port, kChat, chat("x", R"(,"colour":"red")")).status, 200);
  int lines = 0;
  for (const std::string& line : s.log()) lines += line.find("colour") != std::string::npos;
  EXPECT_EQ(lines, 1);
}

TEST(Chat, StrictRequestsRefuseUnknownFields) {
  TestServer s({}, {.strict_requests = true});
  const std::string known = R"(,"user":"me","metadata":{},"store":false,"min_p":0.5)";
  EXPECT_EQ(http_post(s.port, kChat, chat("x", known)).status, 200);
  for (const auto& [more, param] :
       {std::pair{R"(,"colour":"red")", "colour"}, {R"(,"stream_options":{"x":1})", "stream_options.x"}}) {
    const HttpAnswer answer = http_post(s.port, kChat, chat("x", more));
    EXPECT_EQ(answer.status, 400);
    const json error = body_of(answer)["error"];
    EXPECT_EQ(error["param"], param);
    EXPECT_NE(error["message"].get<std::string>().find("is not a field of /v1/chat/completions"),
              std::string::npos);
  }
  EXPECT_EQ(http_post(s.port, "/generate", R"({"text":"a","sampling_params":{"colour":1}})").status, 400);
  EXPECT_EQ(s.engine.stats().num_requests_total, 1);
}

TEST(Chat, UnknownModelIs404) {
  TestServer s;
  const HttpAnswer answer =
      http_post(s.port, kChat, R"({"model":"gpt-9","messages":[{"role":"user","content":"x"}]})");
  EXPECT_EQ(answer.status, 404);
  EXPECT_EQ(body_of(answer)["error"]["type"], "not_found_error");
  EXPECT_EQ(body_of(answer)["error"]["param"], "model");
}

TEST(Chat, TooLongIsContextLengthExceeded) {
  TestServer s;
  const HttpAnswer answer = http_post(s.port, kChat, chat(std::string(4096, 'x')));
  EXPECT_EQ(answer.status, 400);
  EXPECT_EQ(body_of(answer)["error"]["code"], "context_length_exceeded");
}

TEST(Chat, FullQueueIs503WithRetryAfter) {
  TestServer s(FakeOptions{std::chrono::microseconds(0), 0});
  const HttpAnswer answer = http_post(s.port, kChat, chat("x"));
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(answer.headers.at("retry-after"), "1");
}

TEST(Chat, PartlyRefusedChoicesAreAborted) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1), 2});
  EXPECT_EQ(http_post(s.port, kChat, chat("x", R"(,"n":3,"ignore_eos":true)")).status, 503);
  EXPECT_TRUE(eventually([&] { return s.engine.aborted() == 2; }));
}

TEST(Chat, EngineErrorIs500OrAnEvent) {
  TestServer s;
  const HttpAnswer whole = http_post(s.port, kChat, chat("FAIL"));
  EXPECT_EQ(whole.status, 500);
  EXPECT_EQ(body_of(whole)["error"]["message"], "asked to fail");
  const auto events = parse_events(http_post(s.port, kChat, chat("FAIL", R"(,"stream":true)")).body);
  ASSERT_GE(events.size(), 2u);
  EXPECT_EQ(events[events.size() - 2]["error"]["type"], "server_error");
  EXPECT_EQ(events.back(), "[DONE]");
}

// return_token_ids adds the ids of the prompt and of each choice, also in streams.
TEST(Chat, TokenIds) {
  TestServer s;
  const json body = body_of(http_post(s.port, kChat, chat("ab", R"(,"return_token_ids":true)")));
  EXPECT_EQ(body["prompt_token_ids"], json::array({97, 98}));
  EXPECT_EQ(body["choices"][0]["token_ids"], json::array({97, 98, 256}));
  const auto events =
      parse_events(http_post(s.port, kChat, chat("ab", R"(,"return_token_ids":true,"stream":true)")).body);
  EXPECT_EQ(events[0]["prompt_token_ids"], json::array({97, 98}));
  json streamed = json::array();
  for (const json& event : events)
    if (event.is_object())
      for (const json& id : event["choices"][0].value("token_ids", json::array())) streamed.push_back(id);
  EXPECT_EQ(streamed, json::array({97, 98, 256}));
}

TEST(Chat, RoutedExperts) {
  TestServer s;
  const std::string more = R"(,"return_routed_experts":true,"routed_experts_start_len":1)";
  const char* const text = "AQAAAAIBAAD/////";  // base64 of 1, 258, -1
  EXPECT_EQ(body_of(http_post(s.port, kChat, chat("ab", more)))["sglext"]["routed_experts"], text);
  const std::string prompt = R"({"prompt":"ab")" + more;
  EXPECT_EQ(body_of(http_post(s.port, kText, prompt + "}"))["sglext"]["routed_experts"], text);
  const std::vector<std::pair<std::string, std::string>> streams = {
      {kChat, chat("ab", more + R"(,"stream":true)")}, {kText, prompt + R"(,"stream":true})"}};
  for (const auto& [path, request] : streams) {
    const auto events = parse_events(http_post(s.port, path, request).body);
    const json& last = events.at(events.size() - 2);  // before [DONE]
    EXPECT_EQ(last["sglext"]["routed_experts"], text) << path;
    EXPECT_EQ(last["choices"], json::array());
  }
  EXPECT_FALSE(body_of(http_post(s.port, kChat, chat("ab"))).contains("sglext"));
}

TEST(Chat, RequestIdsAndPriority) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  const json body = body_of(http_post(s.port, kChat, chat("ab", R"(,"rid":"mine","priority":7)")));
  EXPECT_EQ(body["id"], "mine");
  EXPECT_EQ(s.engine.last_request().id, "mine");
  EXPECT_EQ(s.engine.last_request().priority, 7);
  EXPECT_EQ(body_of(http_post(s.port, kText, R"({"prompt":"a","request_id":"yours"})"))["id"], "yours");
  for (const char* more : {R"(,"rid":"")", R"(,"rid":5)"})
    EXPECT_EQ(body_of(http_post(s.port, kChat, chat("x", more)))["error"]["param"], "rid");

  // A request that is refused for a duplicate id does not affect the request that owns the id.
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 0; }));
  std::thread running([&] {
    const json whole =
        body_of(http_post(s.port, kChat, chat("abc", R"(,"rid":"mine","ignore_eos":true,"max_tokens":200)")));
    EXPECT_EQ(whole.value("/usage/completion_tokens"_json_pointer, 0), 200) << whole;
  });
  EXPECT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  EXPECT_EQ(http_post(s.port, kChat, chat("x", R"(,"rid":"mine")")).status, 400);
  running.join();
  EXPECT_EQ(s.engine.aborted(), 0);
}

TEST(Chat, AStreamWithoutNewsIsKeptAlive) {
  TestServer s(FakeOptions{std::chrono::milliseconds(400)}, {.keep_alive_seconds = 0.1});
  const HttpAnswer answer = http_post(s.port, kChat, chat("ab", R"(,"stream":true)"));
  EXPECT_NE(answer.body.find("\n\n: keep-alive\n\n"), std::string::npos) << answer.body;
  EXPECT_NE(answer.body.find("data: [DONE]"), std::string::npos);
  const HttpAnswer whole = http_post(s.port, kChat, chat("ab"));
  EXPECT_EQ(whole.body.find("keep-alive"), std::string::npos);
  TestServer silent(FakeOptions{std::chrono::milliseconds(300)}, {.keep_alive_seconds = 0});
  EXPECT_EQ(http_post(silent.port, kChat, chat("ab", R"(,"stream":true)")).body.find(": keep"),
            std::string::npos);
}

}  // namespace
}  // namespace fp4moe
