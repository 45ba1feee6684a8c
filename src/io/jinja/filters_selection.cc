// Filters that apply an attribute, a filter or a test to each item: map, select, reject and the attr forms.
#include <optional>

#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/selection.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

AttributePath::AttributePath(Call& call, size_t parameter, const Value* fallback)
    : call_(call), fallback_(fallback) {
  if (call.has(parameter) && !call.arg(parameter).is<None>()) add(call.arg(parameter));
}

AttributePath::AttributePath(Call& call, const Value& attribute, const Value* fallback)
    : call_(call), fallback_(fallback) {
  if (!attribute.is<None>()) add(attribute);
}

void AttributePath::add(const Value& attribute) {
  if (!attribute.is<Text>()) {
    parts_.push_back(attribute);
    return;
  }
  for (const std::string_view part : split(attribute.as<Text>()->bytes, ".", -1, false)) {
    const bool is_index =
        !part.empty() && part.size() < 18 && part.find_first_not_of("0123456789") == std::string_view::npos;
    parts_.push_back(is_index ? Value(static_cast<int64_t>(std::stoll(std::string(part))))
                              : text_value(part));
  }
}

Value AttributePath::of(const Value& item) const {
  Value value = item;
  for (const Value& part : parts_) {
    value = call_.interpreter.item(value, part);
    if (value.is<Undefined>() && fallback_ != nullptr) value = *fallback_;
  }
  return value;
}

namespace {

Arguments without_first(const Arguments& given, size_t count) {
  Arguments rest = given;
  rest.positional.erase(rest.positional.begin(), rest.positional.begin() + static_cast<ptrdiff_t>(count));
  return rest;
}

Value map_attribute(Call& call) {
  const Value *attribute = nullptr, *fallback = nullptr;
  for (const auto& [name, value] : call.given.named) {
    if (name == "attribute") {
      attribute = &value;
    } else if (name == "default") {
      fallback = value.is<None>() ? nullptr : &value;
    } else {
      fail("Unexpected keyword argument '" + std::string(name) + "'");
    }
  }
  if (attribute == nullptr) fail("map requires a filter argument");
  const AttributePath path(call, *attribute, fallback);
  std::vector<Value> out;
  for (const Value& item : iterate(call.heap, call.self)) out.push_back(path.of(item));
  return generator_value(call.heap, out);
}

Value map(Call& call) {
  if (!truth(call.self)) return generator_value(call.heap, {});
  if (call.given.positional.empty()) return map_attribute(call);
  const std::string_view filter = require_text(call.given.positional[0], "a filter's name");
  const Arguments rest = without_first(call.given, 1);
  std::vector<Value> out;
  for (const Value& item : iterate(call.heap, call.self))
    out.push_back(call.interpreter.apply_filter(filter, item, rest));
  return generator_value(call.heap, out);
}

template <bool kKeep, bool kByAttribute>
Value select(Call& call) {
  if (!truth(call.self)) return generator_value(call.heap, {});
  const auto& given = call.given.positional;
  const size_t num_own = kByAttribute ? 1 : 0;
  if (given.size() < num_own) fail("Missing parameter for attribute name");
  const AttributePath path(call, kByAttribute ? given[0] : Value(None{}));
  const bool has_test = given.size() > num_own;
  const std::string_view test = has_test ? require_text(given[num_own], "a test's name") : std::string_view();
  const Arguments rest = has_test ? without_first(call.given, num_own + 1) : Arguments();
  std::vector<Value> kept;
  for (const Value& item : iterate(call.heap, call.self)) {
    const Value value = path.of(item);
    const bool passes = has_test ? call.interpreter.apply_test(test, value, rest) : truth(value);
    if (passes == kKeep) kept.push_back(item);
  }
  return generator_value(call.heap, kept);
}

constexpr Builtin kSelectionFilters[] = {
    {"map", "*", 0, map},
    {"select", "*", 0, select<true, false>},
    {"reject", "*", 0, select<false, false>},
    {"selectattr", "*", 0, select<true, true>},
    {"rejectattr", "*", 0, select<false, true>},
};

}  // namespace

std::span<const Builtin> selection_filters() { return kSelectionFilters; }

}  // namespace fp4moe::jinja
