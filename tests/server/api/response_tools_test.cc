// The tools of POST /v1/responses that are not plain functions: namespaces, and tools that are ignored.
#include <gtest/gtest.h>

#include "server/api/responses_requests.h"

namespace fp4moe {
namespace {

using nlohmann::json;

// A namespace with the functions `names`.
json name_space(const std::string& name, const std::vector<std::string>& names) {
  json tools = json::array();
  for (const std::string& one : names)
    tools.push_back({{"type", "function"}, {"name", one}, {"strict", false}, {"defer_loading", true}});
  return {{"type", "namespace"}, {"name", name}, {"description", "d"}, {"tools", std::move(tools)}};
}

TEST(Responses, FlattenNamespaces) {
  TestServer s(kHermes);
  const std::string call =
      R"(<tool_call>{"name": "files__read", "arguments": {}}</tool_call><tool_call>{"name": "look", "arguments": {}}</tool_call>)";
  const json tools = {kTools[0], name_space("files", {"read", "look"})};
  const json response = respond(s, input(call, {{"tools", tools}}));
  const json shown = json::parse(s.engine.last_options().tools_json);
  ASSERT_EQ(shown.size(), 3u);
  EXPECT_EQ(shown[1]["function"]["name"], "files__read");
  EXPECT_EQ(shown[2]["function"]["name"], "files__look");
  EXPECT_EQ(response["tools"], tools);
  ASSERT_EQ(response["output"].size(), 2u) << response;
  EXPECT_EQ(response["output"][0]["name"], "read");
  EXPECT_EQ(response["output"][0]["namespace"], "files");
  EXPECT_EQ(response["output"][1]["name"], "look");
  EXPECT_FALSE(response["output"][1].contains("namespace"));
  int64_t named = 0;
  for (const json& event : stream(s, input(call, {{"tools", tools}}))) {
    if (!event.contains("item") || event["output_index"] != 0) continue;
    EXPECT_EQ(event["item"]["name"], "read");
    EXPECT_EQ(event["item"]["namespace"], "files");
    ++named;
  }
  EXPECT_EQ(named, 2);  // added and done
  // The calls of a conversation have the names that the model sees, whether replayed or stored.
  json replay = json::array({{{"role", "user"}, {"content", "x"}}});
  for (const json& item : response["output"]) replay.push_back(item);
  const json again = messages_of(s, input(replay, {{"tools", tools}}));
  const json stored =
      messages_of(s, input("y", {{"tools", tools}, {"previous_response_id", response["id"]}}));
  for (const json& messages : {again, stored}) {
    EXPECT_EQ(messages[1]["tool_calls"][0]["function"]["name"], "files__read") << messages;
    EXPECT_EQ(messages[1]["tool_calls"][1]["function"]["name"], "look");
  }
  for (const std::string& line : s.log()) EXPECT_EQ(line.find("unknown"), std::string::npos) << line;
}

TEST(Responses, ChooseAFunctionOfANamespace) {
  TestServer s(kHermes);
  const json tools = {kTools[0], name_space("files", {"read", "look"}), name_space("web", {"read", "open"})};
  const auto grammar = [&](const json& choice) {
    respond(s, input("x", {{"tools", tools}, {"tool_choice", choice}}));
    return s.engine.last_request().sampling.grammar.text;
  };
  const auto function = [](const char* name) { return json{{"type", "function"}, {"name", name}}; };
  EXPECT_NE(grammar(function("open")).find("web__open"), std::string::npos);
  EXPECT_NE(grammar(function("web__read")).find("web__read"), std::string::npos);
  EXPECT_EQ(grammar(function("look")).find("files__look"), std::string::npos);  // the one without a namespace
  grammar({{"type", "allowed_tools"}, {"tools", {function("open"), function("files__read")}}});
  EXPECT_EQ(json::parse(s.engine.last_options().tools_json).size(), 2u);
  const json several = refused(s, input("x", {{"tools", tools}, {"tool_choice", function("read")}}));
  EXPECT_EQ(several["param"], "tool_choice.name");
  EXPECT_NE(several["message"].get<std::string>().find("\"files__read\" or \"web__read\""), std::string::npos)
      << several;
}

TEST(Responses, NameTheWrongNamespace) {
  const auto tools = [](const json& last) {
    return input("a", {{"tools", {{{"type", "web_search"}}, kTools[1], last}}});
  };
  json custom = name_space("n", {"f"}), bad = custom, deep = custom, none = custom;
  custom["tools"][0]["type"] = "custom";
  bad["tools"][0]["parameters"] = 7;
  deep["tools"][0] = name_space("m", {"f"});
  none["tools"][0].erase("name");
  expect_named({{tools(name_space("", {"f"})), "tools[2].name"},
                {tools({{"type", "namespace"}, {"name", 7}}), "tools[2].name"},
                {tools({{"type", "namespace"}, {"name", "n"}}), "tools[2].tools"},
                {tools({{"type", "namespace"}, {"name", "n"}, {"tools", {7}}}), "tools[2].tools[0]"},
                {tools(custom), "tools[2].tools[0].type"},
                {tools(deep), "tools[2].tools[0].type"},
                {tools(none), "tools[2].tools[0].name"},
                {tools(bad), "tools[2].tools[0].parameters"},
                {tools(name_space("a b", {"f"})), "tools[2].tools[0].name"},
                {tools(name_space("n", {"f", "f"})), "tools[2].tools[1].name"},
                {tools({{"type", "function"}, {"name", "a b"}}), "tools[2].name"},
                {input("a", {{"tools", {name_space("n", {"f"}), {{"type", "function"}, {"name", "n__f"}}}}}),
                 "tools[1].name"}});
}

// Codex sends web_search by default.
TEST(Responses, IgnoreToolsThatOnlyOpenAisServersHave) {
  TestServer s(kHermes);
  json tools = json::array();
  for (const char* type : {"web_search", "web_search_2025_08_26", "web_search_preview", "image_generation"})
    tools.push_back({{"type", type}, {"external_web_access", true}});
  tools.push_back(kTools[0]);
  const json response = respond(s, input("x", {{"tools", tools}}));
  EXPECT_EQ(response["tools"], json::array({kTools[0]}));
  EXPECT_EQ(json::parse(s.engine.last_options().tools_json).size(), 1u);
}

}  // namespace
}  // namespace fp4moe
