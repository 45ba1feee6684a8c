// Any text as model output in any dialect: parsing it whole and byte by byte gives the same joined parts.
#include <cstdint>
#include <string_view>

#include "server/chat/argument_types.h"
#include "server/chat/output_parser.h"
#include "server/json.h"

namespace {

using namespace fp4moe;

std::unique_ptr<OutputParser> make(unsigned dialect) {
  if (dialect % 8 == 0) return make_harmony_parser();
  static const auto types = [] {
    auto some = std::make_shared<ArgumentTypes>();
    some->add("f", json::parse(R"({"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}})"));
    return some;
  }();
  auto calls = make_call_parser(static_cast<CallSyntax>(dialect % 7), types);
  if (dialect % 3 == 0) return calls;
  return make_think_parser(dialect % 3 == 1, std::move(calls),
                           dialect % 2 == 1 ? kKimiTokens.section_begin : std::string_view());
}

void add_joined(OutputParts& joined, const OutputParts& parts) {
  for (const OutputPart& part : parts) {
    if (!joined.empty() && part.kind != OutputPart::Kind::kCall && joined.back().kind == part.kind)
      joined.back().text += part.text;
    else
      joined.push_back(part);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto whole = make(data[0]), cut = make(data[0]);
  OutputParts parts, joined, cut_parts, cut_joined;
  whole->push(text, parts);
  whole->finish(parts);
  add_joined(joined, parts);
  for (const char c : text) cut->push({&c, 1}, cut_parts);
  cut->finish(cut_parts);
  add_joined(cut_joined, cut_parts);
  if (joined != cut_joined) __builtin_trap();
  return 0;
}
