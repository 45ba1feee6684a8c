// The input is a template and messages, split at the first zero byte; the messages are also used as tools.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "io/jinja/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t split = input.find('\0');
  const auto parsed = fp4moe::ChatTemplate::parse(input.substr(0, split));
  if (!parsed.ok()) return 0;
  const std::string_view messages = split == std::string_view::npos ? "[]" : input.substr(split + 1);
  fp4moe::ChatTemplateOptions options;
  options.tools_json = messages;
  (void)parsed->render(messages, options);
  return 0;
}
