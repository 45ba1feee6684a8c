// Any text as model output in any dialect: parsing it whole and byte by byte gives the same joined parts.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "server/chat/argument_types.h"
#include "server/chat/output_parser.h"
#include "server/json.h"

namespace {

using namespace fp4moe;

constexpr int kNumSyntaxes = 8;

CallSyntax syntax_of(uint8_t first) { return static_cast<CallSyntax>(first % kNumSyntaxes); }

// `first` selects the syntax of calls, whether reasoning precedes them, and what else ends it.
std::unique_ptr<OutputParser> make(uint8_t first) {
  if (syntax_of(first) == CallSyntax::kHarmony) return make_harmony_parser();
  static const auto types = [] {
    auto some = std::make_shared<ArgumentTypes>();
    some->add("f", json::parse(R"({"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}})"));
    return some;
  }();
  auto calls = make_call_parser(syntax_of(first), types);
  const unsigned mode = first / kNumSyntaxes;
  if (mode % 3 == 0) return calls;
  static constexpr std::string_view kEnds[] = {"", kKimiTokens.section_begin, kFunctionCallBegin};
  return make_think_parser(mode % 3 == 1, std::move(calls), kEnds[mode / 3 % 3]);
}

void add_joined(OutputParts& joined, const OutputParts& parts) {
  for (const OutputPart& part : parts) {
    if (!joined.empty() && part.kind != OutputPart::Kind::kCall && joined.back().kind == part.kind)
      joined.back().text += part.text;
    else
      joined.push_back(part);
  }
}

// Arguments that are written from plain text are JSON, unless the output ends inside the last call.
void check_arguments(const OutputParts& joined) {
  const auto is_call = [](const OutputPart& part) { return part.kind == OutputPart::Kind::kCall; };
  const auto last = std::find_if(joined.rbegin(), joined.rend(), is_call).base();
  for (auto part = joined.begin(); part != last; ++part)
    if (part->kind == OutputPart::Kind::kArguments && !json::accept(part->text)) __builtin_trap();
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
  // Invalid UTF-8, which json::accept() refuses, stays as it is.
  const bool is_plain =
      syntax_of(data[0]) == CallSyntax::kArgumentTags || syntax_of(data[0]) == CallSyntax::kFunctionTags;
  if (is_plain && json::accept("\"" + json_escaped(text) + "\"")) check_arguments(joined);
  return 0;
}
