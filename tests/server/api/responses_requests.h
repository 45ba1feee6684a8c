// Requests to the Responses API, and its JSON responses and events.
#pragma once

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "server/server_fixture.h"

namespace fp4moe {

inline const std::string kResponses = "/v1/responses";
inline const FakeOptions kHermes{.chat_template = "{{ tools }}<tool_call></tool_call><think></think>",
                                 .has_grammars = true};
// The tools look and wait.
inline const nlohmann::json kTools = nlohmann::json::parse(
    R"([{"type":"function","name":"look","description":"Looks.","parameters":{"type":"object","properties":{"x":{"type":"integer"}}},"strict":true},
        {"type":"function","name":"wait"}])");

inline nlohmann::json input(const nlohmann::json& given,
                            const nlohmann::json& more = nlohmann::json::object()) {
  nlohmann::json body = {{"input", given}};
  body.update(more);
  return body;
}

inline nlohmann::json respond(TestServer& s, const nlohmann::json& body, const std::string& headers = "") {
  const HttpAnswer answer = http_post(s.port, kResponses, body.dump(), headers);
  EXPECT_EQ(answer.status, 200) << answer.body;
  return nlohmann::json::parse(answer.body);
}

// The error object; `status` is the expected one.
inline nlohmann::json refused(TestServer& s, const nlohmann::json& body, int status = 400,
                              const std::string& headers = "") {
  const HttpAnswer answer = http_post(s.port, kResponses, body.dump(), headers);
  EXPECT_EQ(answer.status, status) << answer.body;
  return nlohmann::json::parse(answer.body)["error"];
}

// The named events of a stream. Checks their names and numbers.
inline std::vector<nlohmann::json> named_events(const std::string& body) {
  std::vector<nlohmann::json> events;
  std::istringstream lines(body);
  std::string name;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("event: ", 0) == 0) name = line.substr(7);
    if (line.rfind("data: ", 0) != 0) continue;
    events.push_back(nlohmann::json::parse(line.substr(6)));
    EXPECT_EQ(events.back()["type"], name);
    EXPECT_EQ(events.back()["sequence_number"], events.size() - 1);
  }
  return events;
}
inline std::vector<nlohmann::json> stream(TestServer& s, nlohmann::json body) {
  body["stream"] = true;
  return named_events(http_post(s.port, kResponses, body.dump()).body);
}

// The text of all message items.
inline std::string text_of(const nlohmann::json& response) {
  std::string text;
  for (const auto& item : response["output"])
    if (item["type"] == "message") text += item["content"][0]["text"];
  return text;
}

inline nlohmann::json messages_of(TestServer& s, const nlohmann::json& body) {
  respond(s, body);
  return nlohmann::json::parse(s.engine.last_messages());
}

// Each pair is a body and the field that the error names.
using WrongFields = std::vector<std::pair<nlohmann::json, std::string>>;
inline void expect_named(const WrongFields& cases) {
  TestServer s({.chat_template = kHermes.chat_template, .has_grammars = true});
  for (const auto& [body, param] : cases) {
    const nlohmann::json error = refused(s, body);
    EXPECT_EQ(error["param"], param) << body << error;
    EXPECT_EQ(error["message"].get<std::string>().find(param), 0u) << error;
  }
}

}  // namespace fp4moe
