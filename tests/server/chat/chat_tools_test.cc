// Tool calls, reasoning and constraints of chat requests.
#include <gtest/gtest.h>

#include "server/chat/chat_requests.h"
#include "server/chat/output_parser.h"

namespace fp4moe {
namespace {

const std::string kHermesTemplate = "{{ tools }}<tool_call></tool_call>";
const FakeOptions kHermes{.chat_template = kHermesTemplate + "<think></think>", .has_grammars = true};
const FakeOptions kHarmony{
    .chat_template = "{{ tools }}<|channel|> developer message.thinking",
    .special_tokens = {"<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"},
    .has_grammars = true};

TEST(ChatTools, ACallInTheModelsSyntax) {
  TestServer s(kHermes);
  const std::string text =
      "<think>Hm.</think>\n\nI look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"x\": "
      "1}}\n</tool_call>";
  const json whole = choice(s, chat(text, tools()));
  EXPECT_EQ(whole["finish_reason"], "tool_calls");
  EXPECT_EQ(whole["message"]["content"], "I look.");
  EXPECT_EQ(whole["message"]["reasoning_content"], "Hm.");
  ASSERT_EQ(whole["message"]["tool_calls"].size(), 1u);
  EXPECT_EQ(whole["message"]["tool_calls"][0]["function"],
            (json{{"name", "look"}, {"arguments", "{\"x\": 1}"}}));
  const json stream = collected(s, chat(text, tools()));
  EXPECT_EQ(stream["content"], "I look.");
  EXPECT_EQ(stream["reasoning_content"], "Hm.");
  EXPECT_EQ(stream["tool_calls"], json::parse(R"([{"name":"look","arguments":"{\"x\": 1}"}])"));
  EXPECT_EQ(stream["finish_reason"], "tool_calls");
  EXPECT_FALSE(s.engine.last_options().tools_json.empty());
}

TEST(ChatTools, NoneMeansText) {
  TestServer s(kHermes);
  const std::string call = R"(<tool_call>{"name":"look","arguments":{}}</tool_call>)";
  for (const json& more : {json::object(), tools({{"tool_choice", "none"}})}) {
    const json answer = choice(s, chat(call, more));
    EXPECT_EQ(answer["message"]["content"], call);
    EXPECT_EQ(answer["finish_reason"], "stop");
    EXPECT_TRUE(s.engine.last_options().tools_json.empty());
  }
}

TEST(ChatTools, OneCallIfNotParallel) {
  TestServer s(kHermes);
  const std::string call = R"(<tool_call>{"name":"look","arguments":{}}</tool_call>)";
  EXPECT_EQ(choice(s, chat(call + call, tools()))["message"]["tool_calls"].size(), 2u);
  const json one = chat(call + call, tools({{"parallel_tool_calls", false}}));
  EXPECT_EQ(choice(s, one)["message"]["tool_calls"].size(), 1u);
  EXPECT_EQ(collected(s, one)["tool_calls"].size(), 1u);
}

TEST(ChatTools, ReasoningThatThePromptHasOpened) {
  TestServer s(kHermes);
  // The prompt ends in <think>, so the output starts inside reasoning.
  const json answer = choice(s, chat("well</think>yes<think>"));
  EXPECT_EQ(answer["message"]["reasoning_content"], "well");
  EXPECT_EQ(answer["message"]["content"], "yes<think>");
  const json joined = choice(s, chat("<think>a</think>b", {{"separate_reasoning", false}}));
  EXPECT_EQ(joined["message"]["content"], "<think>a</think>b");
}

TEST(ChatTools, HarmonyKeepsItsTokens) {
  TestServer s(kHarmony);
  const std::string text =
      "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
      "<|constrain|>json<|message|>{\"x\":1}<|call|>";
  const json stream = collected(s, chat(text, tools()));
  EXPECT_FALSE(s.engine.last_request().sampling.skip_special_tokens);
  EXPECT_EQ(stream["reasoning_content"], "Hm");
  EXPECT_EQ(stream["tool_calls"], json::parse(R"([{"name":"look","arguments":"{\"x\":1}"}])"));
}

TEST(ChatTools, WithoutASyntaxAForcedCallIsAJsonArray) {
  TestServer s(FakeOptions{.chat_template = "{{ messages }}", .has_grammars = true});
  const std::string text = R"([{"name":"look","parameters":{"x":2}}])";
  const json answer = choice(s, chat(text, tools({{"tool_choice", "required"}})));
  EXPECT_EQ(answer["message"]["tool_calls"][0]["function"]["arguments"], R"({"x":2})");
  EXPECT_EQ(answer["message"]["content"], nullptr);
  const GrammarSpec grammar = s.engine.last_request().sampling.grammar;
  ASSERT_EQ(grammar.kind, GrammarSpec::Kind::kStructuralTag);
  EXPECT_NE(grammar.text.find(R"({\"name\":\"wait\",\"parameters\":)"), std::string::npos) << grammar.text;
}

TEST(ChatTools, AForcedCallThatIsCutOffLeavesNoText) {
  TestServer s(FakeOptions{.chat_template = "{{ messages }}", .has_grammars = true});
  const std::string text = R"([{"name":"look","parameters":{"x":2}}])";
  for (const auto& [tokens, calls] : {std::pair<int, json>{10, json::array()},
                                      {20, {{{"name", "look"}, {"arguments", ""}}}},
                                      {33, {{{"name", "look"}, {"arguments", "{\"x\""}}}}}) {
    const json body = chat(text, tools({{"tool_choice", "required"}, {"max_tokens", tokens}}));
    const json answer = choice(s, body);
    EXPECT_EQ(answer["finish_reason"], "length");
    EXPECT_TRUE(answer["message"]["content"].is_null() || answer["message"]["content"] == "") << answer;
    json whole = json::array();
    for (const json& call : answer["message"].value("tool_calls", json::array()))
      whole.push_back(call["function"]);
    EXPECT_EQ(whole, calls);
    const json stream = collected(s, body);
    EXPECT_EQ(stream["finish_reason"], "length");
    EXPECT_EQ(stream["content"], "");
    EXPECT_EQ(stream["tool_calls"], calls);
  }
}

TEST(ChatTools, ANamedFunctionIsTheOnlyOne) {
  TestServer s(kHermes);
  const json named = {{"type", "function"}, {"function", {{"name", "wait"}}}};
  choice(s, chat("x", tools({{"tool_choice", named}})));
  const std::string grammar = s.engine.last_request().sampling.grammar.text;
  EXPECT_NE(grammar.find("wait"), std::string::npos);
  EXPECT_EQ(grammar.find("look"), std::string::npos);
  EXPECT_NE(grammar.find("\"stop_after_first\":true"), std::string::npos) << grammar;
  EXPECT_NE(grammar.find("</think>"), std::string::npos);  // reasoning is still allowed first
}

// instructor sends both to /v1/responses.
TEST(ChatTools, AForcedCallTakesPrecedenceOverTheFormatOfTexts) {
  TestServer s(kHermes);
  const json format = {{"type", "json_schema"}, {"json_schema", {{"schema", {{"type", "boolean"}}}}}};
  for (const json& text_format : {format, json{{"type", "json_object"}}, json{{"type", "text"}}}) {
    const json forced = tools({{"tool_choice", "required"}, {"response_format", text_format}});
    const json answer = choice(s, chat(R"(<tool_call>{"name":"wait","arguments":{}}</tool_call>)", forced));
    EXPECT_EQ(answer["message"]["tool_calls"][0]["function"]["name"], "wait");
    const std::string grammar = s.engine.last_request().sampling.grammar.text;
    EXPECT_NE(grammar.find("look"), std::string::npos) << grammar;
    EXPECT_EQ(grammar.find("boolean"), std::string::npos) << grammar;
  }
  const json whole = {{"type", "structural_tag"}, {"format", {{"type", "any_text"}}}};
  EXPECT_EQ(error(s, chat("x", tools({{"tool_choice", "required"}, {"response_format", whole}})))["param"],
            "tool_choice");
}

// openai-agents and pydantic-ai send a format for the last response along with the tools of a run.
TEST(ChatTools, TheFormatOfTextsLeavesRoomForACall) {
  const json schema = {{"type", "boolean"}};
  const json format = {{"type", "json_schema"}, {"json_schema", {{"schema", schema}}}};
  const auto last_part = [&](const FakeOptions& options, const json& more) {
    TestServer s(options);
    choice(s, chat("<think></think>", more));
    const json whole = json::parse(s.engine.last_request().sampling.grammar.text);
    return whole["format"]["type"] == "sequence" ? whole["format"]["elements"].back() : whole["format"];
  };
  for (const FakeOptions& options : {kHermes, kHarmony}) {
    const json either = last_part(options, tools({{"response_format", format}}));
    ASSERT_EQ(either["type"], "or") << either;
    ASSERT_EQ(either["elements"].size(), 2u);
    EXPECT_NE(either["elements"][0].dump().find("boolean"), std::string::npos) << either;
    EXPECT_NE(either["elements"][1].dump().find("look"), std::string::npos) << either;
    EXPECT_EQ(either["elements"][1].dump().find("integer"), std::string::npos)
        << "arguments are free with auto";
  }
  EXPECT_EQ(last_part(kHarmony, tools({{"tool_choice", "none"}, {"response_format", format}}))["type"],
            "sequence");
  TestServer s(kHermes);
  choice(s, chat("<think></think>", tools({{"tool_choice", "none"}, {"response_format", format}})));
  EXPECT_EQ(s.engine.last_request().sampling.grammar,
            (GrammarSpec{GrammarSpec::Kind::kJsonSchema, R"({"type":"boolean"})"}));
}

TEST(ChatTools, WrongFieldsAreNamed) {
  TestServer s(kHermes), without(FakeOptions{.chat_template = kHermesTemplate});
  EXPECT_EQ(error(s, chat("x", {{"tool_choice", "required"}}))["param"], "tool_choice");
  EXPECT_EQ(error(s, chat("x", tools({{"tool_choice", "some"}})))["param"], "tool_choice");
  const json other = {{"type", "function"}, {"function", {{"name", "other"}}}};
  EXPECT_EQ(error(s, chat("x", tools({{"tool_choice", other}})))["param"], "tool_choice.function.name");
  EXPECT_EQ(error(s, chat("x", {{"tools", {{{"type", "function"}}}}}))["param"], "tools[0].function.name");
  EXPECT_EQ(error(s, chat("x", {{"tools", {{{"type", "web"}}}}}))["param"], "tools[0].type");
  EXPECT_EQ(error(s, chat("x", tools({{"tool_choice", "required"}, {"regex", "a"}})))["param"],
            "tool_choice");
  EXPECT_EQ(error(without, chat("x", tools({{"tool_choice", "required"}})))["param"], "tool_choice");
}

TEST(ChatTools, AreNotHiddenByATemplateWithoutAPlaceForThem) {
  TestServer s(FakeOptions{.chat_template = "{{ messages }}", .has_grammars = true});
  for (const json& more : {json::object(), json{{"tool_choice", "auto"}}, json{{"tool_choice", nullptr}}}) {
    const json refusal = error(s, chat("x", tools(more)));
    EXPECT_EQ(refusal["param"], "tool_choice");
    EXPECT_NE(refusal["message"].get<std::string>().find("has no place for tools"), std::string::npos);
  }
  const json named = {{"type", "function"}, {"function", {{"name", "wait"}}}};
  for (const json& legal : {json("none"), json("required"), named})
    choice(s, chat("x", tools({{"tool_choice", legal}})));
  choice(s, chat("x", {{"tools", json::array()}}));
}

TEST(ChatText, SpecialTokensThatUsersAndToolsWriteAreText) {
  TestServer s(FakeOptions{.chat_template = "", .special_tokens = {"<|end|>", "|end", "\u00e9\u00e9"}});
  const auto ids_of = [&](const std::string& role, const std::string& content) {
    const HttpAnswer answer =
        post(s, {{"messages", {{{"role", role}, {"content", content}}}}, {"max_tokens", 1}});
    EXPECT_EQ(answer.status, 200) << answer.body;
    return s.engine.last_request().input_ids;
  };
  std::string marks;
  for (char last = '\x90'; last != '\xAF'; ++last) marks += {'\xEF', '\xB7', last};  // all but the last
  for (const std::string text : {"a<|end|>b<|end|>", "<<|end|>", "<|end", "\u00e9\u00e9\u00e9", "no marks"})
    for (const std::string& content : {text, marks + text}) {
      const std::vector<int32_t> bytes(
          reinterpret_cast<const unsigned char*>(content.data()),
          reinterpret_cast<const unsigned char*>(content.data()) + content.size());
      EXPECT_EQ(ids_of("user", content), bytes) << content;
      EXPECT_EQ(ids_of("tool", content), bytes) << content;
    }
  EXPECT_EQ(ids_of("system", "<|end|>"), std::vector<int32_t>{257});
  const std::string all = marks + "\xEF\xB7\xAF" + "<|end|>";
  EXPECT_EQ(error(s, chat(all))["param"], "messages");
  EXPECT_EQ(post(s, chat(marks + "\xEF\xB7\xAF")).status, 200);
}

TEST(ChatTools, CallsInTheHistoryReachTheTemplate) {
  TestServer s(kHermes);
  json body = {{"messages",
                {{{"role", "developer"}, {"content", "a"}},
                 {{"role", "assistant"},
                  {"content", nullptr},
                  {"tool_calls",
                   {{{"id", "call_1"},
                     {"type", "function"},
                     {"function", {{"name", "f"}, {"arguments", "{\"x\":1}"}}}}}}},
                 {{"role", "tool"}, {"tool_call_id", "call_1"}, {"content", "b"}}}}};
  choice(s, body);
  const json messages = json::parse(s.engine.last_messages());
  EXPECT_EQ(messages[0]["role"], "system");
  EXPECT_EQ(messages[1]["tool_calls"][0]["function"]["arguments"], (json{{"x", 1}}));
  EXPECT_EQ(messages[2]["tool_call_id"], "call_1");
  body["messages"][1]["tool_calls"] = "f";
  EXPECT_EQ(error(s, body)["param"], "messages[1].tool_calls");
}

TEST(Constraints, FieldsBecomeGrammars) {
  using Kind = GrammarSpec::Kind;
  TestServer s(FakeOptions{.chat_template = "", .has_grammars = true});
  const std::tuple<json, Kind, std::string> cases[] = {
      {{{"response_format", {{"type", "json_object"}}}}, Kind::kJsonSchema, R"({"type":"object"})"},
      {{{"response_format",
         {{"type", "json_schema"},
          {"json_schema", {{"name", "n"}, {"strict", true}, {"schema", {{"type", "null"}}}}}}}},
       Kind::kJsonSchema,
       R"({"type":"null"})"},
      {{{"regex", "a+"}}, Kind::kRegex, "a+"},
      {{{"ebnf", "root ::= \"a\""}}, Kind::kEbnf, "root ::= \"a\""},
      {{{"json_schema", R"( {"type": "null"} )"}}, Kind::kJsonSchema, R"({"type":"null"})"},
      {{{"response_format", {{"type", "text"}}}}, Kind::kNone, ""}};
  for (const auto& [fields, kind, text] : cases) {
    choice(s, chat("x", fields));
    EXPECT_EQ(s.engine.last_request().sampling.grammar, (GrammarSpec{kind, text})) << fields;
  }
  http_post(s.port, "/generate", R"({"text":"x","sampling_params":{"regex":"b"}})");
  EXPECT_EQ(s.engine.last_request().sampling.grammar.text, "b");
  http_post(s.port, "/v1/completions", R"({"prompt":"x","response_format":{"type":"json_object"}})");
  EXPECT_EQ(s.engine.last_request().sampling.grammar.kind, Kind::kJsonSchema);
}

TEST(Constraints, WrongOnesAreNamed) {
  TestServer s(FakeOptions{.chat_template = "", .has_grammars = true}), without;
  EXPECT_EQ(error(s, chat("x", {{"response_format", {{"type", "xml"}}}}))["param"], "response_format.type");
  EXPECT_EQ(error(s, chat("x", {{"response_format", {{"type", "json_schema"}}}}))["param"],
            "response_format.json_schema.schema");
  EXPECT_EQ(error(s, chat("x", {{"json_schema", "{"}}))["param"], "json_schema");
  EXPECT_EQ(error(s, chat("x", {{"json_schema", 5}}))["param"], "json_schema");
  EXPECT_EQ(error(s, chat("x", {{"regex", "a"}, {"ebnf", "b"}}))["param"], "ebnf");
  EXPECT_EQ(error(s, chat("x", {{"regex", ""}}))["param"], "regex");
  EXPECT_EQ(error(without, chat("x", {{"regex", "a"}}))["code"], "unsupported");
}

TEST(Constraints, HarmonyConstrainsItsFinalMessage) {
  TestServer s(kHarmony);
  choice(s, chat("x", {{"response_format", {{"type", "json_object"}}}}));
  const json format = json::parse(s.engine.last_request().sampling.grammar.text)["format"]["elements"];
  EXPECT_EQ(format[0]["type"], "optional");
  const json& message = format[1]["elements"];
  EXPECT_EQ(message[0], (json{{"type", "token"}, {"token", 257}}));
  EXPECT_EQ(message[1]["value"], "final");
  EXPECT_EQ(message[3]["json_schema"], (json{{"type", "object"}}));
}

TEST(Constraints, ThinkingModelsMayThinkFirst) {
  TestServer s(kHermes);
  const json more = {{"regex", "a"}};
  const auto elements = [&](const std::string& prompt) {
    choice(s, chat(prompt, more));
    return json::parse(s.engine.last_request().sampling.grammar.text)["format"]["elements"];
  };
  EXPECT_EQ(elements("x")[0]["type"], "optional");
  EXPECT_EQ(elements("x<think>\n")[0]["elements"][0]["type"], "any_text");
  choice(s, chat("x<think></think>\n", more));
  EXPECT_EQ(s.engine.last_request().sampling.grammar.kind, GrammarSpec::Kind::kRegex);
}

}  // namespace
}  // namespace fp4moe
