// /v1/messages and /v1/messages/count_tokens, field by field. The fake engine's output is its prompt: the
// messages' contents, concatenated.
#include "server/api/messages_requests.h"

namespace fp4moe {
namespace {

using nlohmann::json;

// The messages and template variables that a request is translated into.
json turns(TestServer& s, const json& body) {
  message(s, body);
  return json::parse(s.engine.last_messages());
}
json kwargs(TestServer& s, const json& body) {
  message(s, body);
  const std::string text = s.engine.last_options().kwargs_json;
  return text.empty() ? json::object() : json::parse(text);
}
SamplingParams sampling(TestServer& s, const json& body) {
  message(s, body);
  return s.engine.last_request().sampling;
}

std::string log_of(TestServer& s) {
  std::string log;
  for (const std::string& line : s.log()) log += line + "\n";
  return log;
}

// The events of a stream; checks that each is named by its type.
std::vector<json> events_of(const std::string& body) {
  std::vector<json> events;
  std::istringstream lines(body);
  std::string name;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("event: ")) name = line.substr(7);
    if (!line.starts_with("data: ")) continue;
    events.push_back(json::parse(line.substr(6)));
    EXPECT_EQ(events.back()["type"], name);
  }
  return events;
}
std::vector<json> stream(TestServer& s, json body) {
  body["stream"] = true;
  const HttpAnswer answer = post(s, body);
  EXPECT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.headers.at("content-type"), "text/event-stream; charset=utf-8");
  return events_of(answer.body);
}

// Assembles a stream's message like Anthropic's client; checks the order of its events.
json collected(TestServer& s, const json& body) {
  json result;
  bool is_open = false;
  std::string input;
  for (const json& event : stream(s, body)) {
    const std::string type = event["type"];
    if (type == "message_start") result = event["message"];
    json& content = result["content"];
    if (type == "content_block_start") {
      EXPECT_FALSE(std::exchange(is_open, true));
      EXPECT_EQ(event["index"], content.size());
      content.push_back(event["content_block"]);
      input.clear();
    } else if (type == "content_block_delta") {
      EXPECT_TRUE(is_open);
      EXPECT_EQ(event["index"], content.size() - 1);
      for (const char* field : {"text", "thinking", "signature"})
        if (event["delta"].contains(field))
          content.back()[field].get_ref<std::string&>() += event["delta"][field].get<std::string>();
      input += event["delta"].value("partial_json", "");
    } else if (type == "content_block_stop") {
      EXPECT_TRUE(std::exchange(is_open, false));
      if (!input.empty()) content.back()["input"] = json::parse(input);
    } else if (type == "message_delta") {
      result.update(event["delta"]);
      result["usage"] = event["usage"];
    }
  }
  return result;
}
json without_ids(json message) {
  message.erase("id");
  for (json& block : message["content"]) block.erase("id");
  return message;
}

TEST(Messages, Whole) {
  TestServer s;
  const HttpAnswer answer = post(s, request("hello"));
  EXPECT_EQ(answer.headers.at("content-type"), "application/json");
  json body = body_of(answer);
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("msg_"));
  body.erase("id");
  EXPECT_EQ(body, json::parse(R"({"type":"message","role":"assistant","model":"fake",
      "content":[{"type":"text","text":"hello"}],"stop_reason":"end_turn","stop_sequence":null,
      "usage":{"input_tokens":1,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":6}})"));
}

TEST(Messages, StreamHasNamedEvents) {
  TestServer s;
  const std::vector<json> events = stream(s, request("ab"));
  ASSERT_EQ(events.size(), 7u);
  const json& start = events[0]["message"];
  EXPECT_EQ(start["content"], json::array());
  EXPECT_TRUE(start["stop_reason"].is_null());
  EXPECT_EQ(start["usage"]["input_tokens"], 2);
  EXPECT_EQ(
      events[1],
      json::parse(R"({"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}})"));
  EXPECT_EQ(
      events[2],
      json::parse(R"({"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}})"));
  EXPECT_EQ(events[3]["delta"]["text"], "b");
  EXPECT_EQ(events[4], json::parse(R"({"type":"content_block_stop","index":0})"));
  EXPECT_EQ(events[5]["delta"], json::parse(R"({"stop_reason":"end_turn","stop_sequence":null})"));
  EXPECT_EQ(events[5]["usage"]["output_tokens"], 3);
  EXPECT_EQ(events[6], json::parse(R"({"type":"message_stop"})"));
}

TEST(Messages, QuietStreamsGetPings) {
  TestServer s(FakeOptions{.step = std::chrono::milliseconds(300)}, ServerConfig{.keep_alive_seconds = 0.05});
  const std::vector<json> events = stream(s, request("ab"));
  EXPECT_NE(std::find(events.begin(), events.end(), json{{"type", "ping"}}), events.end());
}

TEST(Messages, ThinkingTextAndCalls) {
  TestServer s(kHermesMessages);
  const json body = request("<think>Hm.</think>I look." + kCall + kCall,
                            {{"tools", kLook}, {"thinking", {{"type", "enabled"}, {"budget_tokens", 1024}}}});
  const json whole = message(s, body);
  ASSERT_EQ(whole["content"].size(), 4u) << whole;
  EXPECT_EQ(whole["content"][0],
            json::parse(R"({"type":"thinking","thinking":"Hm.","signature":"unsigned"})"));
  EXPECT_EQ(whole["content"][1], json::parse(R"({"type":"text","text":"I look."})"));
  EXPECT_EQ(whole["content"][2]["type"], "tool_use");
  EXPECT_TRUE(whole["content"][2]["id"].get<std::string>().starts_with("toolu_"));
  EXPECT_NE(whole["content"][2]["id"], whole["content"][3]["id"]);
  EXPECT_EQ(whole["content"][2]["name"], "look");
  EXPECT_EQ(whole["content"][2]["input"], (json{{"x", 1}}));
  EXPECT_EQ(whole["stop_reason"], "tool_use");
  EXPECT_EQ(without_ids(collected(s, body)), without_ids(whole));
}

TEST(Messages, ReasoningIsShownOnlyIfThinkingIsOn) {
  TestServer s(kHermesMessages);
  const std::string text = "<think>Hm.</think>Yes.";
  for (const json& more : {json::object(), json{{"thinking", {{"type", "disabled"}}}}}) {
    const json body = request(text, more);
    EXPECT_EQ(message(s, body)["content"], json::parse(R"([{"type":"text","text":"Yes."}])"));
    EXPECT_EQ(without_ids(collected(s, body)), without_ids(message(s, body)));
  }
  const json omitted = request(text, {{"thinking", {{"type", "adaptive"}, {"display", "omitted"}}}});
  EXPECT_EQ(message(s, omitted)["content"][0],
            json::parse(R"({"type":"thinking","thinking":"","signature":"unsigned"})"));
  EXPECT_EQ(without_ids(collected(s, omitted)), without_ids(message(s, omitted)));
}

TEST(Messages, ThinkingSetsTheTemplatesSwitches) {
  TestServer s;
  EXPECT_EQ(kwargs(s, request("a")), json::object());
  for (const char* type : {"enabled", "adaptive", "between_tools"})
    EXPECT_EQ(kwargs(s, request("a", {{"thinking", {{"type", type}}}})),
              json::parse(R"({"enable_thinking":true,"thinking":true})"));
  const json off = {{"type", "disabled"}};
  EXPECT_EQ(kwargs(s, request("a", {{"thinking", off}})),
            json::parse(R"({"enable_thinking":false,"thinking":false,"reasoning_effort":"low"})"));
  EXPECT_EQ(
      kwargs(s, request("a", {{"thinking", off}, {"chat_template_kwargs", {{"thinking", 7}}}}))["thinking"],
      7);
  for (const auto& [effort, chat] : std::vector<std::pair<const char*, const char*>>{
           {"low", "low"}, {"medium", "medium"}, {"high", "high"}, {"xhigh", "high"}, {"max", "high"}})
    EXPECT_EQ(kwargs(s, request("a", {{"output_config", {{"effort", effort}}}})),
              (json{{"reasoning_effort", chat}}));
  EXPECT_EQ(refusal(s, request("a", {{"thinking", {{"type", "on"}}}})),
            R"(thinking.type: must be "enabled", "adaptive", "between_tools" or "disabled", got "on")");
  EXPECT_EQ(refusal(s, request("a", {{"thinking", {{"type", "adaptive"}, {"display", "all"}}}})),
            R"(thinking.display: must be "summarized" or "omitted", got "all")");
  EXPECT_EQ(refusal(s, request("a", {{"output_config", {{"effort", "huge"}}}})),
            R"(output_config.effort: must be "low", "medium", "high", "xhigh" or "max", got "huge")");
}

TEST(Messages, SamplingFieldsReachTheEngine) {
  TestServer s;
  const SamplingParams p = sampling(s, request("hello", {{"temperature", 0.5},
                                                         {"top_p", 0.25},
                                                         {"top_k", 7},
                                                         {"max_tokens", 9},
                                                         {"stop_sequences", {"x", "y"}},
                                                         {"min_p", 0.125},
                                                         {"stop", "ignored"},
                                                         {"n", 3}}));
  EXPECT_EQ(p.temperature, 0.5f);
  EXPECT_EQ(p.top_p, 0.25f);
  EXPECT_EQ(p.top_k, 7);
  EXPECT_EQ(p.max_new_tokens, 9);
  EXPECT_EQ(p.stop, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(p.min_p, 0.125f);
  for (const std::string field : {"stop", "n"})
    EXPECT_NE(log_of(s).find("/v1/messages: unknown field " + field + " is ignored"), std::string::npos);
}

TEST(Messages, StopReasons) {
  TestServer s(FakeOptions{.context_length = 10});
  json body = message(s, request("abc", {{"stop_sequences", {"b"}}}));
  EXPECT_EQ(body["content"][0]["text"], "a");
  EXPECT_EQ(body["stop_reason"], "stop_sequence");
  EXPECT_EQ(body["stop_sequence"], "b");
  EXPECT_EQ(message(s, request("abc", {{"max_tokens", 2}}))["stop_reason"], "max_tokens");
  body = message(s, request("abc", {{"max_tokens", 0}}));
  EXPECT_EQ(body["content"], json::parse(R"([{"type":"text","text":""}])"));
  EXPECT_EQ(body["stop_reason"], "max_tokens");
  EXPECT_EQ(without_ids(collected(s, request("abc", {{"max_tokens", 0}}))), without_ids(body));
}

TEST(Messages, MetadataCacheControlAndUnknownBlockFieldsAreIgnored) {
  TestServer s(FakeOptions{}, ServerConfig{.strict_requests = true});
  const json cache = {{"type", "ephemeral"}};
  const json body = request({{{"type", "text"}, {"text", "a"}, {"cache_control", cache}}},
                            {{"system", {{{"type", "text"}, {"text", "s"}, {"cache_control", cache}}}},
                             {"cache_control", cache},
                             {"metadata", {{"user_id", "u"}}},
                             {"service_tier", "auto"},
                             {"context_management", {{"edits", json::array()}}},
                             {"mcp_servers", json::array()}});
  EXPECT_EQ(message(s, body)["content"][0]["text"], "sa");
  EXPECT_EQ(refusal(s, request("a", {{"stop", "x"}})).substr(0, 6), "stop: ");
}

TEST(Messages, Conversation) {
  TestServer s;
  const json body = {{"max_tokens", 9},
                     {"system",
                      {{{"type", "text"}, {"text", "x-anthropic-billing-header: cch=1;"}},
                       {{"type", "text"}, {"text", "S"}}}},
                     {"messages", json::parse(R"([
        {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
        {"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":"s"},
          {"type":"redacted_thinking","data":"d"},{"type":"text","text":"c"},
          {"type":"tool_use","id":"t1","name":"f","input":{"x":1}},
          {"type":"tool_use","id":"t2","name":"g","input":{}}]},
        {"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":"r"},
          {"type":"tool_result","tool_use_id":"t2","is_error":true,
           "content":[{"type":"text","text":"p"},{"type":"text","text":"q"}]},
          {"type":"tool_result","tool_use_id":"t3"},
          {"type":"text","text":"d"}]},
        {"role":"system","content":"T"},
        {"role":"user","content":"e"}])")}};
  EXPECT_EQ(turns(s, body), json::parse(R"([
      {"role":"system","content":"S"},
      {"role":"user","content":"a\nb"},
      {"role":"assistant","content":"c","reasoning_content":"t","tool_calls":[
        {"id":"t1","type":"function","function":{"name":"f","arguments":{"x":1}}},
        {"id":"t2","type":"function","function":{"name":"g","arguments":{}}}]},
      {"role":"tool","tool_call_id":"t1","content":"r"},
      {"role":"tool","tool_call_id":"t2","content":"Error: p\nq"},
      {"role":"tool","tool_call_id":"t3","content":""},
      {"role":"user","content":"d"},
      {"role":"system","content":"T"},
      {"role":"user","content":"e"}])"));
  EXPECT_FALSE(s.engine.last_options().continue_final_message);
}

TEST(Messages, SystemMessagesMoveToTheFrontIfTheTemplateNeedsIt) {
  TestServer s(FakeOptions{.is_system_first = true});
  json body = request("a", {{"system", "S"}});
  body["messages"].push_back({{"role", "system"}, {"content", "x-anthropic-billing-header: cch=1;"}});
  body["messages"].push_back({{"role", "system"}, {"content", "T"}});
  body["messages"].push_back({{"role", "user"}, {"content", "b"}});
  EXPECT_EQ(turns(s, body),
            json::parse(R"([{"role":"system","content":"S\nT"},{"role":"user","content":"a\nb"}])"));
}

TEST(Messages, AFinalAssistantMessageIsContinued) {
  TestServer s;
  json body = request("a");
  body["messages"].push_back({{"role", "assistant"}, {"content", "The answer is ("}});
  message(s, body);
  EXPECT_TRUE(s.engine.last_options().continue_final_message);
  EXPECT_FALSE(s.engine.last_options().add_generation_prompt);
}

TEST(Messages, ToolsReachTheTemplate) {
  TestServer s(kHermesMessages);
  message(s, request("a", {{"tools", kLook}}));
  EXPECT_EQ(json::parse(s.engine.last_options().tools_json), json::parse(R"([
      {"type":"function","function":{"name":"look","description":"Looks.",
        "parameters":{"type":"object","properties":{"x":{"type":"integer"}}}}},
      {"type":"function","function":{"name":"wait","parameters":{}}}])"));
}

TEST(Messages, ToolChoice) {
  TestServer s(kHermesMessages);
  const auto choice = [](const json& value) { return json{{"tools", kLook}, {"tool_choice", value}}; };
  EXPECT_EQ(message(s, request(kCall, choice({{"type", "auto"}})))["stop_reason"], "tool_use");
  EXPECT_EQ(message(s, request(kCall, choice({{"type", "none"}})))["content"][0]["text"], kCall);
  const json one = choice({{"type", "auto"}, {"disable_parallel_tool_use", true}});
  EXPECT_EQ(message(s, request(kCall + kCall, one))["content"].size(), 1u);
  EXPECT_EQ(collected(s, request(kCall + kCall, one))["content"].size(), 1u);
  const std::string any = sampling(s, request(kCall, choice({{"type", "any"}}))).grammar.text;
  EXPECT_NE(any.find("look"), std::string::npos);
  EXPECT_NE(any.find("wait"), std::string::npos);
  const std::string named =
      sampling(s, request(kCall, choice({{"type", "tool"}, {"name", "wait"}}))).grammar.text;
  EXPECT_EQ(named.find("look"), std::string::npos);
  EXPECT_EQ(refusal(s, request("a", choice({{"type", "tool"}, {"name", "nap"}}))),
            R"(tool_choice.name: is not one of the tools: "nap")");
  EXPECT_EQ(refusal(s, request("a", choice({{"type", "required"}}))),
            R"(tool_choice.type: must be "auto", "any", "tool" or "none", got "required")");
  EXPECT_EQ(refusal(s, request("a", choice("any"))), "tool_choice must be a JSON object, not string");
}

TEST(Messages, ArgumentsThatAreNoJsonObjectAreReturnedAsText) {
  TestServer s(FakeOptions{.chat_template = "{{ messages }}", .has_grammars = true});
  const json body = request(R"([{"name":"look","parameters":{"x":2}}])",
                            {{"tools", kLook}, {"tool_choice", {{"type", "any"}}}, {"max_tokens", 34}});
  const json whole = message(s, body);
  EXPECT_EQ(whole["content"][0]["input"], (json{{"INVALID_JSON", R"({"x":)"}}));
  EXPECT_EQ(whole["stop_reason"], "max_tokens");
}

TEST(Messages, OutputFormat) {
  TestServer s(kHermesMessages);
  const json format = {{"type", "json_schema"}, {"schema", {{"type", "integer"}}}};
  for (const json& more : {json{{"output_config", {{"format", format}}}}, json{{"output_format", format}}}) {
    const GrammarSpec grammar = sampling(s, request("1", more)).grammar;
    EXPECT_NE(grammar.text.find(R"("json_schema":{"type":"integer"})"), std::string::npos) << grammar.text;
  }
  const auto error = [&](const json& value) {
    return refusal(s, request("a", {{"output_config", {{"format", value}}}}));
  };
  EXPECT_EQ(error({{"type", "json_schema"}}), "output_config.format.schema: is missing");
  EXPECT_EQ(error({{"type", "json_schema"}, {"schema", 7}}),
            "output_config.format.schema: must be a JSON Schema object, not number");
  EXPECT_EQ(error({{"type", "text"}}), R"(output_config.format.type: must be "json_schema", got "text")");
  EXPECT_EQ(refusal(s, request("a", {{"output_config", {{"format", format}}}, {"output_format", format}})),
            "output_config.format: cannot be combined with output_format, its older name");
  TestServer plain;
  EXPECT_TRUE(refusal(plain, request("a", {{"output_config", {{"format", format}}}}))
                  .starts_with("output_config.format: needs a grammar backend"));
}

TEST(Messages, AnErrorWithinAStreamIsAnEvent) {
  TestServer s;
  const std::vector<json> events = stream(s, request("FAIL"));
  EXPECT_EQ(events.front()["type"], "message_start");
  EXPECT_EQ(events.back(),
            json::parse(R"({"type":"error","error":{"type":"api_error","message":"asked to fail"}})"));
}

TEST(Messages, CountsTheTokensOfThePrompt) {
  TestServer s(kHermesMessages);
  const json body = request("hello", {{"system", "sys"}, {"tools", kLook}});
  json count = body;
  count.erase("max_tokens");
  const HttpAnswer answer = http_post(s.port, kCount, count.dump());
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(body_of(answer), (json{{"input_tokens", 8}}));
  const json usage = message(s, body)["usage"];
  EXPECT_EQ(usage["input_tokens"].get<int>() + usage["cache_read_input_tokens"].get<int>(), 8);
  EXPECT_EQ(refusal(s, {{"messages", 7}}, kCount), "messages: must be a non-empty array");
}

TEST(Messages, AbortedMessagesEndAsCutOff) {
  TestServer s(FakeOptions{.step = std::chrono::milliseconds(5)});
  json body = request("abc", {{"rid", "mine"}, {"ignore_eos", true}});
  std::thread client([&] {
    const json aborted = message(s, body);
    EXPECT_EQ(aborted["id"], "mine");
    EXPECT_EQ(aborted["stop_reason"], "max_tokens");
  });
  EXPECT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  http_post(s.port, "/abort_request", R"({"rid":"mine"})");
  client.join();
}

}  // namespace
}  // namespace fp4moe
