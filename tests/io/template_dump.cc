// Renders templates for comparison with Jinja2. Each line of standard input is a JSON object: template,
// messages and kwargs (values), tools (optional), add_generation_prompt. Each line of output:
// {"text": ...} or {"error": ...}.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "io/jinja/chat_template.h"

namespace {

nlohmann::ordered_json answer(const nlohmann::ordered_json& request) {
  auto parsed = fp4moe::ChatTemplate::parse(request.at("template").get<std::string>());
  if (!parsed.ok()) return {{"error", parsed.status().to_string()}};
  fp4moe::ChatTemplateOptions options;
  options.add_generation_prompt = request.value("add_generation_prompt", true);
  if (request.contains("tools")) options.tools_json = request["tools"].dump();
  if (request.contains("kwargs")) options.kwargs_json = request["kwargs"].dump();
  const auto text = parsed->render(request.at("messages").dump(), options);
  if (!text.ok()) return {{"error", text.status().to_string()}};
  return {{"text", *text}};
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);)
    std::cout << answer(nlohmann::ordered_json::parse(line)).dump() << std::endl;
}
