// Python's operators on values.
#include <cmath>

#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

[[noreturn]] void fail_operands(std::string_view op, const Value& a, const Value& b) {
  fail("unsupported operand type(s) for " + std::string(op) + ": '" + std::string(type_name(a)) + "' and '" +
       std::string(type_name(b)) + "'");
}

[[noreturn]] void fail_overflow(std::string_view op, int64_t a, int64_t b) {
  fail("integer overflow: " + std::to_string(a) + " " + std::string(op) + " " + std::to_string(b) +
       " does not fit in 64 bits");
}

int64_t power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  for (int64_t square = base, left = exponent; left > 0; left >>= 1) {
    if ((left & 1) && __builtin_mul_overflow(result, square, &result)) fail_overflow("**", base, exponent);
    if (left > 1 && __builtin_mul_overflow(square, square, &square)) fail_overflow("**", base, exponent);
  }
  return result;
}

int64_t floor_divide(int64_t a, int64_t b) {
  if (a == INT64_MIN && b == -1) fail_overflow("//", a, b);
  return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

Value integer_binary(std::string_view op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(a, b, &result);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(a, b, &result);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(a, b, &result);
  } else if (op == "**") {
    if (b < 0 && a == 0) fail("0.0 cannot be raised to a negative power");
    if (b < 0) return Value(std::pow(static_cast<double>(a), static_cast<double>(b)));
    return Value(power(a, b));
  } else {
    if (b == 0) fail(op == "/" ? "division by zero" : "integer division or modulo by zero");
    if (op == "/") return Value(static_cast<double>(a) / static_cast<double>(b));
    if (op == "//") return Value(floor_divide(a, b));
    if (b == -1) return Value(int64_t{0});
    return Value(a - b * floor_divide(a, b));
  }
  if (overflow) fail_overflow(op, a, b);
  return Value(result);
}

Value float_binary(std::string_view op, double a, double b) {
  if (op == "+") return Value(a + b);
  if (op == "-") return Value(a - b);
  if (op == "*") return Value(a * b);
  if (op == "**") {
    if (a == 0 && b < 0) fail("0.0 cannot be raised to a negative power");
    if (a < 0 && b != std::floor(b))
      fail("complex numbers are not supported: " + float_repr(a) + " ** " + float_repr(b));
    const double result = std::pow(a, b);
    if (std::isinf(result) && std::isfinite(a) && std::isfinite(b)) fail("Numerical result out of range");
    return Value(result);
  }
  if (b == 0) fail(op == "/" ? "float division by zero" : "float floor division by zero");
  if (op == "/") return Value(a / b);
  double remainder = std::fmod(a, b);
  double quotient = (a - remainder) / b;
  if (remainder != 0 && (b < 0) != (remainder < 0)) {
    remainder += b;
    quotient -= 1;
  }
  if (op == "%") return Value(remainder != 0 ? remainder : std::copysign(0.0, b));
  if (quotient == 0) return Value(std::copysign(0.0, a / b));
  const double floored = std::floor(quotient);
  return Value(quotient - floored > 0.5 ? floored + 1 : floored);
}

Value repeat(Heap& heap, const Value& object, int64_t count) {
  const auto times = static_cast<size_t>(count < 0 ? 0 : count);
  if (const Text* text = object.as<Text>()) {
    std::string out;
    out.reserve(heap.checked_bytes(times, text->bytes.size()));
    for (size_t i = 0; i < times && !text->bytes.empty(); ++i) out += text->bytes;
    return heap_text(heap, out, text->safe);
  }
  const Sequence& s = *object.sequence();
  heap.step(heap.checked_bytes(times, s.items.size() * sizeof(Value)) / sizeof(Value));
  std::vector<Value> items;
  for (size_t i = 0; i < times && !s.items.empty(); ++i)
    items.insert(items.end(), s.items.begin(), s.items.end());
  return sequence_value(heap, s.type, items);
}

bool is_repeatable(const Value& v) {
  return v.is<Text>() || (v.sequence() != nullptr && v.sequence()->type <= SequenceType::kTuple);
}

Value add(Heap& heap, const Value& a, const Value& b) {
  const Text *x = a.as<Text>(), *y = b.as<Text>();
  if (x != nullptr && y != nullptr) {
    const bool safe = x->safe || y->safe;
    heap.checked_bytes(x->bytes.size() + y->bytes.size(), 1);
    std::string text(safe && !x->safe ? escape_html(x->bytes) : x->bytes);
    text += safe && !y->safe ? escape_html(y->bytes) : y->bytes;
    return heap_text(heap, text, safe);
  }
  if (x != nullptr) fail("can only concatenate str (not \"" + std::string(type_name(b)) + "\") to str");
  const Sequence *s = a.sequence(), *t = b.sequence();
  if (s == nullptr || t == nullptr || s->type != t->type || s->type > SequenceType::kTuple)
    fail_operands("+", a, b);
  heap.step(s->items.size() + t->items.size());
  std::vector<Value> items(s->items.begin(), s->items.end());
  items.insert(items.end(), t->items.begin(), t->items.end());
  return sequence_value(heap, s->type, items);
}

// Clamps a slice bound by Python's rule; `absent` is its default, which depends on the step's direction.
int64_t clamped(const Value* bound, int64_t size, int64_t absent, int64_t lowest, int64_t highest) {
  if (bound == nullptr || bound->is<None>()) return absent;
  int64_t at = to_index(*bound, "slice indices");
  if (at < 0) at = at + size;  // cannot overflow: size >= 0
  return at < lowest ? lowest : at > highest ? highest : at;
}

}  // namespace

Value binary(Heap& heap, std::string_view op, const Value& a, const Value& b) {
  if (op == "%" && a.is<Text>()) return format_percent(heap, *a.as<Text>(), b);
  require_defined(a);
  require_defined(b);
  if (a.is_integral() && b.is_integral()) return integer_binary(op, to_index(a, ""), to_index(b, ""));
  if (a.is_number() && b.is_number()) return float_binary(op, to_double(a), to_double(b));
  if (op == "+") return add(heap, a, b);
  if (op == "*" && is_repeatable(a) && b.is_integral()) return repeat(heap, a, to_index(b, ""));
  if (op == "*" && a.is_integral() && is_repeatable(b)) return repeat(heap, b, to_index(a, ""));
  fail_operands(op, a, b);
}

Value negative(const Value& value) {
  require_defined(value);
  if (const double* d = value.as<double>()) return Value(-*d);
  if (value.is_integral()) return integer_binary("-", 0, to_index(value, ""));
  fail("bad operand type for unary -: '" + std::string(type_name(value)) + "'");
}

bool compare_values(Heap& heap, std::string_view op, const Value& a, const Value& b) {
  if (op == "==") return equal(heap, a, b);
  if (op == "!=") return !equal(heap, a, b);
  if (op == "in") return contains(heap, b, a);
  if (op == "not in") return !contains(heap, b, a);
  const int order = compare(heap, a, b, op);
  const auto is_nan = [](const Value& v) { return v.is<double>() && std::isnan(*v.as<double>()); };
  if (is_nan(a) || is_nan(b)) return false;
  if (op == "<") return order < 0;
  if (op == "<=") return order <= 0;
  return op == ">" ? order > 0 : order >= 0;
}

Value slice(Heap& heap, const Value& object, const SliceBounds& bounds) {
  require_defined(object);
  const Sequence* s = object.sequence();
  const Text* text = object.as<Text>();
  if (text == nullptr && (s == nullptr || s->type > SequenceType::kRange))
    return missing_member(heap, object, text_value("slice"));  // same error as for an absent element
  const bool has_step = bounds.step != nullptr && !bounds.step->is<None>();
  const int64_t step = has_step ? to_index(*bounds.step, "slice indices") : 1;
  if (step == 0) fail("slice step cannot be zero");
  const int64_t size = length(heap, object);
  const int64_t lowest = step < 0 ? -1 : 0, highest = step < 0 ? size - 1 : size;
  const int64_t start = clamped(bounds.start, size, step < 0 ? highest : 0, lowest, highest);
  const int64_t stop = clamped(bounds.stop, size, step < 0 ? -1 : size, lowest, highest);
  if (text != nullptr && step == 1) {
    const size_t begin = byte_position(text->bytes, static_cast<size_t>(start));
    const size_t count = stop > start ? static_cast<size_t>(stop - start) : 0;
    return text_value(text->bytes.substr(begin, byte_position(text->bytes.substr(begin), count)), text->safe);
  }
  const std::vector<Value> all = iterate(heap, object);
  std::vector<Value> items;
  for (int64_t at = start; step > 0 ? at < stop : at > stop;) {
    items.push_back(all[static_cast<size_t>(at)]);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  if (s != nullptr && s->type == SequenceType::kRange) {
    const auto element = [&](int64_t at) {
      return std::get<int64_t>(
          integer_binary("+", s->start, std::get<int64_t>(integer_binary("*", at, s->step))));
    };
    const int64_t stride = std::get<int64_t>(integer_binary("*", s->step, step));
    return Value(static_cast<const Sequence*>(
        heap.make<Sequence>(s->type, heap.items(items), false, element(start), element(stop), stride)));
  }
  if (text == nullptr)
    return sequence_value(heap, s->type == SequenceType::kGroup ? SequenceType::kTuple : s->type, items);
  std::string joined;
  for (const Value& item : items) joined += item.as<Text>()->bytes;
  return heap_text(heap, joined, text->safe);
}

}  // namespace fp4moe::jinja
