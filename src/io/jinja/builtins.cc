// Looks up builtins, and defines the built-in tests and functions.
#include "io/jinja/builtins.h"

#include <algorithm>
#include <ctime>

#include "io/jinja/interpreter.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

const Builtin* find_in(std::span<const Builtin> table, std::string_view name) {
  const auto place =
      std::find_if(table.begin(), table.end(), [&](const Builtin& row) { return row.name == name; });
  return place == table.end() ? nullptr : &*place;
}

// Tests: call.self is the tested value.

template <class... Types>
Value is_a(Call& call) {
  return Value((call.self.is<Types>() || ...));
}

template <bool kWanted>
Value is_exactly(Call& call) {
  return Value(call.self.is<bool>() && *call.self.as<bool>() == kWanted);
}

bool leaves(Call& call, const Value& divisor, int64_t remainder) {
  return equal(call.heap, binary(call.heap, "%", call.self, divisor), Value(remainder));
}

template <char kOp0, char kOp1 = '\0'>
Value compares(Call& call) {
  const char op[] = {kOp0, kOp1, '\0'};
  return Value(compare_values(call.heap, op, call.self, call.arg(0)));
}

Value is_sequence(Call& call) {
  const Sequence* s = call.self.sequence();
  return Value(call.self.is<Undefined>() || call.self.is<Text>() || call.self.dict() != nullptr ||
               (s != nullptr && s->type <= SequenceType::kRange));
}

Value is_iterable(Call& call) {
  return Value(call.self.is<Undefined>() || call.self.is<Text>() || call.self.dict() != nullptr ||
               call.self.sequence() != nullptr);
}

Value is_same(Call& call) {
  const Value &a = call.self, &b = call.arg(0);
  const bool same_kind = a.index() == b.index();
  if (same_kind && a.sequence() != nullptr) return Value(a.sequence() == b.sequence());
  if (same_kind && a.dict() != nullptr) return Value(a.dict() == b.dict());
  return Value(same_kind && equal(call.heap, a, b));
}

template <CharClass kClass>
Value is_case(Call& call) {
  return Value(all_of(to_text(call.heap, call.self), kClass));
}

constexpr Builtin kTests[] = {
    {"defined", "", 0, [](Call& c) { return Value(!c.self.is<Undefined>()); }},
    {"undefined", "", 0, is_a<Undefined>},
    {"none", "", 0, is_a<None>},
    {"boolean", "", 0, is_a<bool>},
    {"true", "", 0, is_exactly<true>},
    {"false", "", 0, is_exactly<false>},
    {"integer", "", 0, is_a<int64_t>},
    {"float", "", 0, is_a<double>},
    {"number", "", 0, is_a<bool, int64_t, double>},
    {"string", "", 0, is_a<Text>},
    {"mapping", "", 0, is_a<const Dict*>},
    {"sequence", "", 0, is_sequence},
    {"iterable", "", 0, is_iterable},
    {"callable", "", 0,
     [](Call& c) {
       return Value(c.self.is<const Callable*>() || c.self.is<Loop*>() || c.self.is<Undefined>());
     }},
    {"sameas", "other", 1, is_same},
    {"escaped", "", 0, [](Call& c) { return Value(c.self.is<Text>() && c.self.as<Text>()->safe); }},
    {"odd", "", 0, [](Call& c) { return Value(leaves(c, Value(int64_t{2}), 1)); }},
    {"even", "", 0, [](Call& c) { return Value(leaves(c, Value(int64_t{2}), 0)); }},
    {"divisibleby", "num", 1, [](Call& c) { return Value(leaves(c, c.arg(0), 0)); }},
    {"in", "seq", 1, [](Call& c) { return Value(contains(c.heap, c.arg(0), c.self)); }},
    {"lower", "", 0, is_case<CharClass::kLower>},
    {"upper", "", 0, is_case<CharClass::kUpper>},
    {"filter", "", 0,
     [](Call& c) { return Value(find_filter(require_text(c.self, "a filter's name")) != nullptr); }},
    {"test", "", 0,
     [](Call& c) { return Value(find_test(require_text(c.self, "a test's name")) != nullptr); }},
    {"==", "other", 1, compares<'=', '='>},
    {"eq", "other", 1, compares<'=', '='>},
    {"equalto", "other", 1, compares<'=', '='>},
    {"!=", "other", 1, compares<'!', '='>},
    {"ne", "other", 1, compares<'!', '='>},
    {"<", "other", 1, compares<'<'>},
    {"lt", "other", 1, compares<'<'>},
    {"lessthan", "other", 1, compares<'<'>},
    {"<=", "other", 1, compares<'<', '='>},
    {"le", "other", 1, compares<'<', '='>},
    {">", "other", 1, compares<'>'>},
    {"gt", "other", 1, compares<'>'>},
    {"greaterthan", "other", 1, compares<'>'>},
    {">=", "other", 1, compares<'>', '='>},
    {"ge", "other", 1, compares<'>', '='>},
};

// Functions.

constexpr int64_t kMaxRange = 100'000;  // the limit of Jinja2's sandbox

Value make_range(Call& call) {
  const int64_t first = to_index(call.arg(0), "range()");
  const int64_t start = call.has(1) ? first : 0,
                stop = call.has(1) ? to_index(call.arg(1), "range()") : first;
  const int64_t step = call.has(2) ? to_index(call.arg(2), "range()") : 1;
  if (step == 0) fail("range() arg 3 must not be zero");
  std::vector<Value> items;
  for (int64_t at = start; step > 0 ? at < stop : at > stop;) {
    if (static_cast<int64_t>(items.size()) == kMaxRange)
      fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE (" + std::to_string(kMaxRange) +
           ").");
    items.push_back(Value(at));
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  call.heap.step(items.size() / 8);
  return Value(static_cast<const Sequence*>(
      call.heap.make<Sequence>(SequenceType::kRange, call.heap.items(items), false, start, stop, step)));
}

// Sets the pairs given to dict() and namespace(): first those of a mapping or an iterable of pairs, then the
// keyword arguments.
template <class Set>
void collect_members(Call& call, Set set) {
  if (call.given.positional.size() > 1) fail("expected at most 1 argument");
  if (!call.given.positional.empty()) {
    const Value& source = call.given.positional[0];
    if (const Dict* dict = source.dict()) {
      for (const auto& [key, value] : dict->entries) set(key, value);
    } else {
      for (const Value& pair : iterate(call.heap, source)) {
        const std::vector<Value> both = iterate(call.heap, pair);
        if (both.size() != 2) fail("a pair is required, not " + std::to_string(both.size()) + " items");
        set(both[0], both[1]);
      }
    }
  }
  for (const auto& [name, value] : call.given.named) set(text_value(name), value);
}

Value make_dict(Call& call) {
  DictBuilder builder(call.heap);
  collect_members(call, [&](const Value& key, const Value& value) { builder.set(key, value); });
  return Value(builder.finish());
}

Value make_namespace(Call& call) {
  Namespace* space = call.heap.make<Namespace>(call.heap);
  collect_members(call, [&](const Value& key, const Value& value) {
    space->members[require_text(key, "a namespace's attribute")] = value;
  });
  return Value(space);
}

Value format_now(Call& call) {
  const std::string format(require_text(call.arg(0), "format"));
  if (format.empty()) return text_value("");
  if (format.size() > 1024) fail("the format of strftime_now has more than 1024 bytes");
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::string text(64 * format.size() + 256, '\0');
  text.resize(std::strftime(text.data(), text.size(), format.c_str(), &local));
  return heap_text(call.heap, text);
}

constexpr Builtin kFunctions[] = {
    {"range", "start stop step", 1, make_range},
    {"dict", "*", 0, make_dict},
    {"namespace", "*", 0, make_namespace},
    {"raise_exception", "message", 1, [](Call& c) -> Value { fail(to_text(c.heap, c.arg(0))); }},
    {"strftime_now", "format", 1, format_now},
};

}  // namespace

const Builtin* find_filter(std::string_view name) {
  for (const auto table : {text_filters(), number_filters(), sequence_filters(), selection_filters()})
    if (const Builtin* filter = find_in(table, name)) return filter;
  return nullptr;
}

const Builtin* find_test(std::string_view name) { return find_in(kTests, name); }
const Builtin* find_function(std::string_view name) { return find_in(kFunctions, name); }

const Builtin* find_method(const Value& object, std::string_view name) {
  if (object.is<Text>()) return find_in(text_methods(), name);
  if (object.dict() != nullptr) return find_in(dict_methods(), name);
  if (object.is<Loop*>()) return find_in(loop_methods(), name);
  const Sequence* s = object.sequence();
  return s != nullptr && s->type <= SequenceType::kRange ? find_in(sequence_methods(), name) : nullptr;
}

bool is_forbidden_attribute(const Value& object, std::string_view name) {
  static constexpr std::string_view kList[] = {"append", "clear", "pop",    "reverse",
                                               "insert", "sort",  "extend", "remove"};
  static constexpr std::string_view kDict[] = {"clear", "pop", "popitem", "setdefault", "update"};
  const auto listed = [&](const auto& names) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
  };
  const Sequence* s = object.sequence();
  return (s != nullptr && s->type == SequenceType::kList && listed(kList)) ||
         (object.dict() != nullptr && listed(kDict));
}

}  // namespace fp4moe::jinja
