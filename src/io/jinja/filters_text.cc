// Filters on text, and the tojson filter.
#include <algorithm>

#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

// The filtered value as text; any type is converted, as in Jinja's soft_str.
struct Subject {
  std::string bytes;
  bool safe;
};

Subject subject(Call& call) {
  std::string bytes = to_text(call.heap, call.self);
  call.heap.scan(bytes.size());
  return {std::move(bytes), call.self.is<Text>() && call.self.as<Text>()->safe};
}

template <std::string (*kChange)(std::string_view)>
Value change(Call& call) {
  const Subject s = subject(call);
  return heap_text(call.heap, kChange(s.bytes), s.safe);
}

Value trim(Call& call) {
  const Subject s = subject(call);
  const bool spaces = !call.has(0) || call.arg(0).is<None>();
  const std::string_view out = spaces ? strip(s.bytes, Sides::kBoth)
                                      : strip(s.bytes, Sides::kBoth, require_text(call.arg(0), "chars"));
  return heap_text(call.heap, out, s.safe);
}

Value replace_filter(Call& call) {
  const Subject s = subject(call);
  const std::string from = to_text(call.heap, call.arg(0)), to = to_text(call.heap, call.arg(1));
  const bool unlimited = !call.has(2) || call.arg(2).is<None>();
  call.heap.checked_bytes(static_cast<size_t>(count(s.bytes, from)), to.size());
  return heap_text(call.heap, replace(s.bytes, from, to, unlimited ? -1 : call.int_or(2, -1)), s.safe);
}

Value escape(Call& call) {
  if (call.self.is<Text>() && call.self.as<Text>()->safe) return call.self;
  return heap_text(call.heap, escape_html(to_text(call.heap, call.self)), true);
}

Value force_escape(Call& call) {
  return heap_text(call.heap, escape_html(to_text(call.heap, call.self)), true);
}

Value indent(Call& call) {
  if (call.self.is<Text>() == false) require_text(call.self, "the indented value");
  const Subject s = subject(call);
  const bool first = call.truth_or(1, false), blank = call.truth_or(2, false);
  std::string margin;
  if (call.has(0) && call.arg(0).is<Text>()) {
    margin = call.arg(0).as<Text>()->bytes;
  } else {
    margin.append(call.heap.checked_bytes(static_cast<size_t>(std::max<int64_t>(call.int_or(0, 4), 0)), 1),
                  ' ');
  }
  const std::string text = s.bytes + "\n";
  const std::vector<std::string_view> lines = split_lines(text, false);
  call.heap.checked_bytes(lines.size(), margin.size());
  std::string out;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i == 0 ? first : blank || !lines[i].empty()) out += margin;
    out += lines[i];
  }
  return heap_text(call.heap, out, s.safe);
}

Value center(Call& call) {
  const Value text = text_value(call.heap.text(to_text(call.heap, call.self)));
  Call method{call.interpreter, call.heap, text, call.given, {call.has(0) ? &call.arg(0) : nullptr}};
  const Value width(int64_t{80});
  if (!method.has(0)) method.bound[0] = &width;
  return find_method(text, "center")->run(method);
}

Value truncate(Call& call) {
  const Subject s = subject(call);
  const int64_t wanted = call.int_or(0, 255), leeway = call.int_or(3, 5);
  const std::string_view end = call.has(2) ? require_text(call.arg(2), "end") : std::string_view("...");
  const auto end_points = static_cast<int64_t>(num_points(end));
  if (wanted < end_points)
    fail("expected length >= " + std::to_string(end_points) + ", got " + std::to_string(wanted));
  if (leeway < 0) fail("expected leeway >= 0, got " + std::to_string(leeway));
  if (static_cast<int64_t>(num_points(s.bytes)) <= wanted + leeway)
    return heap_text(call.heap, s.bytes, s.safe);
  std::string_view kept =
      std::string_view(s.bytes).substr(0, byte_position(s.bytes, static_cast<size_t>(wanted - end_points)));
  if (!call.truth_or(1, false)) kept = kept.substr(0, kept.rfind(' '));
  return heap_text(call.heap, std::string(kept) + std::string(end), s.safe);
}

Value count_words(Call& call) {
  const Subject s = subject(call);
  int64_t words = 0;
  bool inside = false;
  for (size_t at = 0; at < s.bytes.size();) {
    const size_t start = at;
    next_point(s.bytes, at);
    const std::string_view point = std::string_view(s.bytes).substr(start, at - start);
    const bool is_word = point == "_" || all_of(point, CharClass::kAlnum);
    words += is_word && !inside;
    inside = is_word;
  }
  return Value(words);
}

Value format_filter(Call& call) {
  if (!call.given.positional.empty() && !call.given.named.empty())
    fail("can't handle positional and keyword arguments at the same time");
  const Subject s = subject(call);
  const Text format{call.heap.text(s.bytes), s.safe};
  if (call.given.named.empty())
    return format_percent(call.heap, format,
                          sequence_value(call.heap, SequenceType::kTuple, call.given.positional));
  DictBuilder named(call.heap);
  for (const auto& [name, value] : call.given.named) named.set(text_value(name), value);
  return format_percent(call.heap, format, Value(named.finish()));
}

Value to_json_filter(Call& call) {
  JsonStyle style;
  style.ensure_ascii = call.truth_or(0, false);
  if (call.has(1) && !call.arg(1).is<None>()) {
    style.pretty = true;
    style.item_separator = ",";
    if (const Text* text = call.arg(1).as<Text>()) {
      style.indent = text->bytes;
    } else {
      style.indent.append(static_cast<size_t>(std::clamp<int64_t>(call.int_or(1, 0), 0, 1024)), ' ');
    }
  }
  if (call.has(2) && !call.arg(2).is<None>()) {
    const std::vector<Value> pair = iterate(call.heap, call.arg(2));
    if (pair.size() != 2) fail("separators must be a pair");
    style.item_separator = require_text(pair[0], "separators");
    style.key_separator = require_text(pair[1], "separators");
  }
  style.sort_keys = call.truth_or(3, false);
  return heap_text(call.heap, to_json(call.heap, call.self, style));
}

constexpr Builtin kTextFilters[] = {
    {"upper", "", 0, change<to_upper>},
    {"lower", "", 0, change<to_lower>},
    {"capitalize", "", 0, change<capitalize>},
    {"title", "", 0, change<title_filter>},
    {"trim", "chars", 0, trim},
    {"replace", "old new count", 2, replace_filter},
    {"string", "", 0,
     [](Call& c) { return c.self.is<Text>() ? c.self : heap_text(c.heap, to_text(c.heap, c.self)); }},
    {"safe", "", 0, [](Call& c) { return heap_text(c.heap, to_text(c.heap, c.self), true); }},
    {"escape", "", 0, escape},
    {"e", "", 0, escape},
    {"forceescape", "", 0, force_escape},
    {"indent", "width first blank", 0, indent},
    {"center", "width", 0, center},
    {"truncate", "length killwords end leeway", 0, truncate},
    {"wordcount", "", 0, count_words},
    {"format", "*", 0, format_filter},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, to_json_filter},
};

}  // namespace

std::span<const Builtin> text_filters() { return kTextFilters; }

}  // namespace fp4moe::jinja
