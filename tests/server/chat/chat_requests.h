// Chat requests with tools for tests of the server. The fake engine's output is its prompt: the messages'
// contents, concatenated.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "server/server_fixture.h"

namespace fp4moe {

using nlohmann::json;

inline constexpr const char* kChat = "/v1/chat/completions";
inline constexpr const char* kTools =
    R"([{"type":"function","function":{"name":"look","parameters":{"type":"object","properties":{"x":{"type":"integer"}}}}},)"
    R"({"type":"function","function":{"name":"wait"}}])";

inline json chat(const std::string& content, const json& more = json::object()) {
  json body = {{"messages", {{{"role", "user"}, {"content", content}}}}};
  body.update(more);
  return body;
}
inline json tools(const json& more = json::object()) {
  json fields = {{"tools", json::parse(kTools)}};
  fields.update(more);
  return fields;
}

inline HttpAnswer post(TestServer& s, const json& body) { return http_post(s.port, kChat, body.dump()); }
inline json choice(TestServer& s, const json& body) {
  const HttpAnswer answer = post(s, body);
  EXPECT_EQ(answer.status, 200) << answer.body;
  return json::parse(answer.body)["choices"][0];
}
inline json error(TestServer& s, const json& body) {
  const HttpAnswer answer = post(s, body);
  EXPECT_EQ(answer.status, 400) << answer.body;
  return json::parse(answer.body)["error"];
}

// Assembles a stream's deltas like OpenAI's client.
inline json collected(TestServer& s, json body) {
  body["stream"] = true;
  const HttpAnswer answer = post(s, body);
  json message = {{"content", ""}, {"reasoning_content", ""}, {"tool_calls", json::array()}};
  std::string finish_reason;
  for (const json& event : parse_events(answer.body)) {
    if (event.is_string()) continue;
    const json& entry = event["choices"][0];
    const json& delta = entry["delta"];
    for (const char* field : {"content", "reasoning_content"})
      if (delta.contains(field) && !delta[field].is_null())
        message[field] = message[field].get<std::string>() + delta[field].get<std::string>();
    for (const json& call : delta.value("tool_calls", json::array())) {
      json& calls = message["tool_calls"];
      const size_t index = call["index"];
      if (index == calls.size()) {
        EXPECT_EQ(call["type"], "function");
        const std::string id = call["id"];
        calls.push_back({{"name", call["function"]["name"]}, {"arguments", ""}});
        if (!id.starts_with("call_")) calls.back()["id"] = id;
      }
      json& arguments = calls.at(index)["arguments"];
      arguments = arguments.get<std::string>() + call["function"]["arguments"].get<std::string>();
    }
    if (!entry["finish_reason"].is_null()) finish_reason = entry["finish_reason"];
  }
  message["finish_reason"] = finish_reason;
  return message;
}

}  // namespace fp4moe
