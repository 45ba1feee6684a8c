// Requests to the OpenAI routes, and their JSON responses.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "server/http_client.h"

namespace fp4moe {

inline const std::string kChat = "/v1/chat/completions";
inline const std::string kText = "/v1/completions";

inline nlohmann::json body_of(const HttpAnswer& answer) { return nlohmann::json::parse(answer.body); }

inline std::string chat(const std::string& text, const std::string& more = "") {
  return R"({"model":"fake","messages":[{"role":"user","content":")" + text + "\"}]" + more + "}";
}

}  // namespace fp4moe
