// Methods of str, list, tuple, dict and loop.
#include <algorithm>

#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

const Text& self_text(const Call& call) { return *call.self.as<Text>(); }

Value like_self(Call& call, std::string_view bytes) {
  return heap_text(call.heap, bytes, self_text(call).safe);
}
// Returns a substring of self, without a copy.
Value part_of_self(Call& call, std::string_view bytes) { return text_value(bytes, self_text(call).safe); }

Value parts_of_self(Call& call, const std::vector<std::string_view>& parts,
                    SequenceType type = SequenceType::kList) {
  std::vector<Value> items;
  for (const std::string_view part : parts) items.push_back(part_of_self(call, part));
  return sequence_value(call.heap, type, items);
}

bool is_given(const Call& call, size_t i) { return call.has(i) && !call.arg(i).is<None>(); }

std::string_view text_arg(const Call& call, size_t i) { return require_text(call.arg(i), "argument"); }

// Returns an argument to be joined with self, escaped if self is markup and the argument is not.
std::string joined_arg(const Call& call, size_t i) {
  const std::string_view bytes = text_arg(call, i);
  return self_text(call).safe && !call.arg(i).as<Text>()->safe ? escape_html(bytes) : std::string(bytes);
}

std::string_view scanned(Call& call) {
  call.heap.scan(self_text(call).bytes.size());
  return self_text(call).bytes;
}

template <Sides kSides>
Value strip_method(Call& call) {
  const std::string_view text = scanned(call);
  if (!is_given(call, 0)) return part_of_self(call, strip(text, kSides));
  call.heap.step(text.size());
  return part_of_self(call, strip(text, kSides, text_arg(call, 0)));
}

template <bool kFromRight>
Value split_method(Call& call) {
  const std::string_view text = scanned(call);
  const int64_t max_splits = call.int_or(1, -1);
  if (!is_given(call, 0)) return parts_of_self(call, split(text, max_splits, kFromRight));
  if (text_arg(call, 0).empty()) fail("empty separator");
  return parts_of_self(call, split(text, text_arg(call, 0), max_splits, kFromRight));
}

template <bool kFromRight>
Value partition_method(Call& call) {
  const std::string_view text = scanned(call), separator = text_arg(call, 0);
  if (separator.empty()) fail("empty separator");
  const size_t at = kFromRight ? text.rfind(separator) : text.find(separator);
  if (at == std::string_view::npos)
    return kFromRight ? parts_of_self(call, {"", "", text}, SequenceType::kTuple)
                      : parts_of_self(call, {text, "", ""}, SequenceType::kTuple);
  return parts_of_self(
      call, {text.substr(0, at), text.substr(at, separator.size()), text.substr(at + separator.size())},
      SequenceType::kTuple);
}

// Returns self[start:stop] for methods with these bounds as arguments 1 and 2; null data if start > size.
std::string_view bounded_self(Call& call, int64_t& start) {
  const Value self = text_value(scanned(call));
  const int64_t size = length(call.heap, self);
  start = std::max<int64_t>(is_given(call, 1) ? call.int_or(1, 0) : 0, -size);
  if (start < 0) start += size;
  if (start > size) return {};
  const SliceBounds bounds{is_given(call, 1) ? &call.arg(1) : nullptr,
                           is_given(call, 2) ? &call.arg(2) : nullptr, nullptr};
  return slice(call.heap, self, bounds).as<Text>()->bytes;
}

template <bool kAtEnd>
Value starts_or_ends(Call& call) {
  int64_t start = 0;
  const std::string_view text = bounded_self(call, start);
  const bool reachable = start <= length(call.heap, call.self);
  const auto matches = [&](const Value& part) {
    const std::string_view bytes = require_text(part, "argument");
    return reachable && (kAtEnd ? text.ends_with(bytes) : text.starts_with(bytes));
  };
  const Sequence* s = call.arg(0).sequence();
  if (s == nullptr || s->type != SequenceType::kTuple) return Value(matches(call.arg(0)));
  return Value(std::any_of(s->items.begin(), s->items.end(), matches));
}

int64_t position_of(Call& call, bool last) {
  int64_t start = 0;
  const std::string_view text = bounded_self(call, start), part = text_arg(call, 0);
  const size_t at = last ? text.rfind(part) : text.find(part);
  if (at == std::string_view::npos || start > length(call.heap, call.self)) return -1;
  return start + static_cast<int64_t>(num_points(text.substr(0, at)));
}

template <bool kLast>
Value find_text(Call& call) {
  return Value(position_of(call, kLast));
}

template <bool kLast>
Value index_text(Call& call) {
  const int64_t at = position_of(call, kLast);
  if (at < 0) fail("substring not found");
  return Value(at);
}

Value count_text(Call& call) {
  int64_t start = 0;
  const std::string_view text = bounded_self(call, start);
  return Value(start > length(call.heap, call.self) ? int64_t{0} : count(text, text_arg(call, 0)));
}

Value replace_method(Call& call) {
  const std::string_view text = scanned(call), from = text_arg(call, 0);
  const std::string to = joined_arg(call, 1);
  call.heap.checked_bytes(static_cast<size_t>(count(text, from)), to.size());
  return like_self(call, replace(text, from, to, call.int_or(2, -1)));
}

Value join_method(Call& call) {
  const Text& separator = self_text(call);
  std::string out;
  bool first = true;
  for (const Value& item : iterate(call.heap, call.arg(0))) {
    if (!first) out += separator.bytes;
    first = false;
    const std::string_view bytes = require_text(item, "sequence item");
    out += separator.safe && !item.as<Text>()->safe ? escape_html(bytes) : std::string(bytes);
    call.heap.checked_bytes(out.size(), 1);
  }
  return like_self(call, out);
}

template <std::string (*kChange)(std::string_view)>
Value change_method(Call& call) {
  return like_self(call, kChange(scanned(call)));
}

template <CharClass kClass>
Value class_method(Call& call) {
  return Value(all_of(scanned(call), kClass));
}

// Pads to a width with a fill character; kLeftHalves (0, 1 or 2) halves of the padding go to the left.
template <int kLeftHalves>
Value pad_method(Call& call) {
  const std::string_view text = scanned(call), fill = call.has(1) ? text_arg(call, 1) : std::string_view(" ");
  if (num_points(fill) != 1) fail("The fill character must be exactly one character long");
  const int64_t size = length(call.heap, call.self), width = call.int_or(0, 0),
                pad = std::max<int64_t>(width - size, 0);
  call.heap.checked_bytes(static_cast<size_t>(pad), fill.size());
  const int64_t left = kLeftHalves == 0 ? 0 : kLeftHalves == 2 ? pad : pad / 2 + (pad & width & 1);
  std::string out;
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += text;
  for (int64_t i = left; i < pad; ++i) out += fill;
  return like_self(call, out);
}

Value zfill_method(Call& call) {
  const std::string_view text = scanned(call);
  const int64_t pad = std::max<int64_t>(call.int_or(0, 0) - length(call.heap, call.self), 0);
  const size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
  std::string out(text.substr(0, sign));
  out.append(call.heap.checked_bytes(static_cast<size_t>(pad), 1), '0');
  return like_self(call, out += text.substr(sign));
}

template <bool kSuffix>
Value remove_method(Call& call) {
  std::string_view text = scanned(call);
  const std::string_view part = text_arg(call, 0);
  if (kSuffix && !part.empty() && text.ends_with(part)) text.remove_suffix(part.size());
  if (!kSuffix && text.starts_with(part)) text.remove_prefix(part.size());
  return part_of_self(call, text);
}

constexpr Builtin kTextMethods[] = {
    {"split", "sep maxsplit", 0, split_method<false>},
    {"rsplit", "sep maxsplit", 0, split_method<true>},
    {"splitlines", "keepends", 0,
     [](Call& c) { return parts_of_self(c, split_lines(scanned(c), c.truth_or(0, false))); }},
    {"partition", "sep", 1, partition_method<false>},
    {"rpartition", "sep", 1, partition_method<true>},
    {"strip", "chars", 0, strip_method<Sides::kBoth>},
    {"lstrip", "chars", 0, strip_method<Sides::kLeft>},
    {"rstrip", "chars", 0, strip_method<Sides::kRight>},
    {"startswith", "prefix start end", 1, starts_or_ends<false>},
    {"endswith", "suffix start end", 1, starts_or_ends<true>},
    {"removeprefix", "prefix", 1, remove_method<false>},
    {"removesuffix", "suffix", 1, remove_method<true>},
    {"find", "sub start end", 1, find_text<false>},
    {"rfind", "sub start end", 1, find_text<true>},
    {"index", "sub start end", 1, index_text<false>},
    {"rindex", "sub start end", 1, index_text<true>},
    {"count", "sub start end", 1, count_text},
    {"replace", "old new count", 2, replace_method},
    {"join", "iterable", 1, join_method},
    {"format", "*", 0, [](Call& c) { return format_braces(c, self_text(c)); }},
    {"upper", "", 0, change_method<to_upper>},
    {"lower", "", 0, change_method<to_lower>},
    {"casefold", "", 0, change_method<to_lower>},
    {"title", "", 0, change_method<title>},
    {"capitalize", "", 0, change_method<capitalize>},
    {"isalpha", "", 0, class_method<CharClass::kAlpha>},
    {"isdigit", "", 0, class_method<CharClass::kDigit>},
    {"isnumeric", "", 0, class_method<CharClass::kDigit>},
    {"isdecimal", "", 0, class_method<CharClass::kDigit>},
    {"isalnum", "", 0, class_method<CharClass::kAlnum>},
    {"isspace", "", 0, class_method<CharClass::kSpace>},
    {"isupper", "", 0, class_method<CharClass::kUpper>},
    {"islower", "", 0, class_method<CharClass::kLower>},
    {"ljust", "width fillchar", 1, pad_method<0>},
    {"center", "width fillchar", 1, pad_method<1>},
    {"rjust", "width fillchar", 1, pad_method<2>},
    {"zfill", "width", 1, zfill_method},
};

Value index_item(Call& call) {
  const auto items = call.self.sequence()->items;
  for (size_t i = 0; i < items.size(); ++i)
    if (equal(call.heap, items[i], call.arg(0))) return Value(static_cast<int64_t>(i));
  fail(to_repr(call.heap, call.arg(0)) + " is not in " + std::string(type_name(call.self)));
}

Value count_items(Call& call) {
  int64_t n = 0;
  for (const Value& item : call.self.sequence()->items) n += equal(call.heap, item, call.arg(0));
  return Value(n);
}

constexpr Builtin kSequenceMethods[] = {
    {"index", "value", 1, index_item},
    {"count", "value", 1, count_items},
    {"copy", "", 0, [](Call& c) { return c.self; }},
};

Value dict_view(Call& call, SequenceType type) {
  std::vector<Value> items;
  call.heap.step(call.self.dict()->entries.size());
  for (const auto& [key, value] : call.self.dict()->entries)
    items.push_back(type == SequenceType::kKeys ? key
                    : type == SequenceType::kValues
                        ? value
                        : sequence_value(call.heap, SequenceType::kTuple, {key, value}));
  return sequence_value(call.heap, type, items);
}

Value get_member(Call& call) {
  const Value* value = find(call.heap, *call.self.dict(), call.arg(0));
  return value != nullptr ? *value : call.arg_or(1, Value(None{}));
}

constexpr Builtin kDictMethods[] = {
    {"get", "key default", 1, get_member},
    {"keys", "", 0, [](Call& c) { return dict_view(c, SequenceType::kKeys); }},
    {"values", "", 0, [](Call& c) { return dict_view(c, SequenceType::kValues); }},
    {"items", "", 0, [](Call& c) { return dict_view(c, SequenceType::kItems); }},
    {"copy", "", 0, [](Call& c) { return c.self; }},
};

Value cycle(Call& call) {
  if (call.given.positional.empty()) fail("no items for cycling given");
  return call.given.positional[std::get<Loop*>(call.self)->at % call.given.positional.size()];
}

Value changed(Call& call) {
  Loop& loop = *std::get<Loop*>(call.self);
  const Value seen = sequence_value(call.heap, SequenceType::kTuple, call.given.positional);
  const bool same = loop.last_seen != nullptr && equal(call.heap, Value(loop.last_seen), seen);
  loop.last_seen = seen.sequence();
  return Value(!same);
}

constexpr Builtin kLoopMethods[] = {
    {"cycle", "*", 0, cycle},
    {"changed", "*", 0, changed},
};

}  // namespace

std::span<const Builtin> text_methods() { return kTextMethods; }
std::span<const Builtin> sequence_methods() { return kSequenceMethods; }
std::span<const Builtin> dict_methods() { return kDictMethods; }
std::span<const Builtin> loop_methods() { return kLoopMethods; }

}  // namespace fp4moe::jinja
