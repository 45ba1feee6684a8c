// Requests to the Messages API, and their responses.
#pragma once

#include "server/api/openai_requests.h"
#include "server/server_fixture.h"

namespace fp4moe {

inline const std::string kMessages = "/v1/messages";
inline const std::string kCount = "/v1/messages/count_tokens";
inline const FakeOptions kHermesMessages{.chat_template = "{{ tools }}<tool_call></tool_call><think></think>",
                                         .has_grammars = true};
inline const nlohmann::json kLook =
    nlohmann::json::parse(R"([{"name":"look","description":"Looks.","cache_control":{"type":"ephemeral"},
    "input_schema":{"type":"object","properties":{"x":{"type":"integer"}}}},
    {"type":"custom","name":"wait","input_schema":{}}])");
inline const std::string kCall = R"(<tool_call>{"name":"look","arguments":{"x": 1}}</tool_call>)";

inline nlohmann::json request(const nlohmann::json& content,
                              const nlohmann::json& more = nlohmann::json::object()) {
  nlohmann::json body = {
      {"model", "fake"}, {"max_tokens", 1000}, {"messages", {{{"role", "user"}, {"content", content}}}}};
  body.update(more);
  return body;
}
inline HttpAnswer post(TestServer& s, const nlohmann::json& body) {
  return http_post(s.port, kMessages, body.dump());
}
inline nlohmann::json message(TestServer& s, const nlohmann::json& body) {
  const HttpAnswer answer = post(s, body);
  EXPECT_EQ(answer.status, 200) << answer.body;
  return body_of(answer);
}
// The message of a refusal.
inline std::string refusal(TestServer& s, const nlohmann::json& body, const std::string& path = kMessages) {
  const HttpAnswer answer = http_post(s.port, path, body.dump());
  EXPECT_EQ(answer.status, 400) << answer.body;
  const nlohmann::json error = body_of(answer);
  EXPECT_EQ(error["type"], "error");
  EXPECT_EQ(error["error"]["type"], "invalid_request_error");
  return error["error"]["message"];
}

}  // namespace fp4moe
