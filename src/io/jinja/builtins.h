// The tables of built-in filters, tests, methods and functions. Lookups return null for unknown names.
#pragma once

#include <span>
#include <string_view>

#include "io/jinja/callable.h"

namespace fp4moe::jinja {

const Builtin* find_filter(std::string_view name);
const Builtin* find_test(std::string_view name);
const Builtin* find_function(std::string_view name);
// Returns the method `name` of `object`'s type, or null.
const Builtin* find_method(const Value& object, std::string_view name);
// True for attributes that Python has but the immutable sandbox refuses.
bool is_forbidden_attribute(const Value& object, std::string_view name);

// The tables, split by file.
std::span<const Builtin> text_filters();
std::span<const Builtin> number_filters();
std::span<const Builtin> sequence_filters();
std::span<const Builtin> selection_filters();
std::span<const Builtin> text_methods();
std::span<const Builtin> sequence_methods();
std::span<const Builtin> dict_methods();
std::span<const Builtin> loop_methods();

// Formats in printf style: format % argument.
Value format_percent(Heap& heap, const Text& format, const Value& argument);
// Formats like str.format().
Value format_braces(Call& call, const Text& format);
// The arguments of Python's json.dumps(), which to_json() implements.
struct JsonStyle {
  bool ensure_ascii = false, sort_keys = false, pretty = false;
  std::string indent, item_separator = ", ", key_separator = ": ";
};
std::string to_json(Heap& heap, const Value& value, const JsonStyle& style);
// Converts JSON text to a value; `what` names the text in errors.
Value from_json(Heap& heap, std::string_view json, std::string_view what);

}  // namespace fp4moe::jinja
