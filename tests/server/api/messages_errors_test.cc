// Errors of /v1/messages: their shape, and the fields that they name.
#include "server/api/messages_requests.h"

namespace fp4moe {
namespace {

using nlohmann::json;

TEST(MessagesErrors, ContentErrorsNameTheBlock) {
  TestServer s;
  const auto error = [&](const char* content) { return refusal(s, request(json::parse(content))); };
  EXPECT_TRUE(error(R"([{"type":"text","text":"a"},{"type":"image","source":{}}])")
                  .starts_with(R"(messages[0].content[1].type: "image" is not supported in a user message)"));
  EXPECT_TRUE(error(R"([{"type":"tool_result","tool_use_id":"t","content":[{"type":"document"}]}])")
                  .starts_with(R"(messages[0].content[0].content[0].type: "document" is not supported)"));
  EXPECT_TRUE(
      error(R"([{"type":"tool_use","id":"t","name":"f","input":{}}])")
          .starts_with(R"(messages[0].content[0].type: "tool_use" is not supported in a user message)"));
  EXPECT_EQ(error(R"([{"type":"text"}])"), "messages[0].content[0].text: is missing");
  EXPECT_EQ(error(R"([7])"), "messages[0].content[0]: must be an object, not number");
  EXPECT_EQ(error(R"(7)"), "messages[0].content: must be a string or an array of blocks, not number");
  EXPECT_EQ(error(R"([{"type":"tool_result"}])"), "messages[0].content[0].tool_use_id: is missing");
  EXPECT_EQ(error(R"([{"type":"tool_result","tool_use_id":"t","is_error":1}])"),
            "messages[0].content[0].is_error: must be a boolean, not number");
  EXPECT_EQ(refusal(s, request("a", {{"system", 7}})),
            "system: must be a string or an array of text blocks, not number");
  for (const char* messages : {"7", "[]", "null"})
    EXPECT_EQ(refusal(s, request("a", {{"messages", json::parse(messages)}})),
              "messages: must be a non-empty array");
  const auto assistant = [&](const char* block) {
    return refusal(
        s, request("a", {{"messages", {{{"role", "assistant"}, {"content", {json::parse(block)}}}}}}));
  };
  EXPECT_EQ(assistant(R"({"type":"tool_use","id":"t","name":"f"})"),
            "messages[0].content[0].input: must be an object, not null");
  EXPECT_EQ(assistant(R"({"type":"thinking"})"), "messages[0].content[0].thinking: is missing");
  EXPECT_TRUE(
      assistant(R"({"type":"server_tool_use"})")
          .starts_with(R"(messages[0].content[0].type: "server_tool_use" is not supported in an assistant)"));
  EXPECT_EQ(refusal(s, request("a", {{"messages", {{{"role", "tool"}, {"content", "a"}}}}})),
            R"(messages[0].role: must be "user", "assistant" or "system", got "tool")");
  EXPECT_EQ(refusal(s, request("a", {{"messages", {{{"role", "user"}}}}})),
            "messages[0].content: is missing");
}

TEST(MessagesErrors, ToolErrorsNameTheField) {
  TestServer s(kHermesMessages);
  const auto error = [&](const char* tool) {
    return refusal(s, request("a", {{"tools", {json::parse(tool)}}}));
  };
  EXPECT_TRUE(error(R"({"type":"web_search_20250305","name":"web_search"})")
                  .starts_with(R"(tools[0].type: "web_search_20250305" is a tool that Anthropic defines)"));
  EXPECT_EQ(error(R"({"name":"f"})"), "tools[0].input_schema: is missing");
  EXPECT_EQ(error(R"({"name":"f","input_schema":7})"),
            "tools[0].input_schema: must be a JSON Schema object, not number");
  EXPECT_EQ(error(R"({"input_schema":{}})"), "tools[0].name: has 0 bytes; the allowed length is 1 to 128");
  EXPECT_EQ(error(R"({"name":"a b","input_schema":{}})"),
            "tools[0].name: must contain only letters, digits, '_', '-' and '.'");
  EXPECT_EQ(error("7"), "tools[0] must be a JSON object, not number");
  EXPECT_EQ(refusal(s, request("a", {{"tools", 7}})), "tools: must be an array, not number");
}

TEST(MessagesErrors, ErrorsNameTheFieldsOfThisApi) {
  TestServer s;
  EXPECT_EQ(refusal(s, {{"messages", {{{"role", "user"}, {"content", "a"}}}}}), "max_tokens: is missing");
  EXPECT_EQ(refusal(s, request("a", {{"max_tokens", -1}})), "max_tokens: must be in 0..2147483647, got -1");
  EXPECT_TRUE(
      refusal(s, request("a", {{"stop_sequences", {""}}})).starts_with("stop_sequences: has a string of 0"));
  EXPECT_TRUE(refusal(s, request("a", {{"stop_sequences", 7}})).starts_with("stop_sequences: must be"));
  EXPECT_TRUE(refusal(s, request("a", {{"top_p", 7}})).starts_with("top_p: must be in (0, 1]"));
  EXPECT_TRUE(refusal(s, request("a", {{"mcp_servers", {1}}})).starts_with("mcp_servers: is not supported"));
  EXPECT_TRUE(refusal(s, request("a", {{"container", "c"}})).starts_with("container: is not supported"));
  EXPECT_TRUE(refusal(s, request(std::string(5000, 'a')))
                  .starts_with("prompt is too long: This model's maximum context length is 4096 tokens"));
}

// The type of the error with which a request is answered.
std::string error_type(const HttpAnswer& answer, int status) {
  EXPECT_EQ(answer.status, status) << answer.body;
  const json body = body_of(answer);
  EXPECT_EQ(body["type"], "error");
  EXPECT_FALSE(body["error"]["message"].get<std::string>().empty());
  return body["error"]["type"];
}

TEST(MessagesErrors, ErrorsHaveAnthropicsShape) {
  TestServer s;
  EXPECT_EQ(error_type(post(s, request("a", {{"model", "other"}})), 404), "not_found_error");
  EXPECT_EQ(error_type(http_post(s.port, kMessages, "not json"), 400), "invalid_request_error");
  EXPECT_EQ(error_type(http_get(s.port, kMessages), 405), "invalid_request_error");
  EXPECT_EQ(error_type(post(s, request("FAIL")), 500), "api_error");
  EXPECT_EQ(error_type(post(s, request("WAITED")), 503), "overloaded_error");
  EXPECT_EQ(error_type(post(s, request("LATE")), 504), "timeout_error");
  EXPECT_EQ(error_type(http_post(s.port, kCount, "[]"), 400), "invalid_request_error");
  TestServer full(FakeOptions{.max_requests = 0});
  EXPECT_EQ(error_type(post(full, request("a")), 503), "overloaded_error");
  TestServer keys(FakeOptions{}, ServerConfig{.api_keys = {"k"}});
  EXPECT_EQ(error_type(post(keys, request("a")), 401), "authentication_error");
  TestServer small(FakeOptions{}, ServerConfig{.max_body_bytes = 100});
  EXPECT_EQ(error_type(post(small, request(std::string(200, 'a'))), 413), "request_too_large");
}

}  // namespace
}  // namespace fp4moe
