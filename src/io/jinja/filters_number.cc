// Filters on numbers, and filters on values of any type.
#include <charconv>
#include <cmath>
#include <optional>

#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

// Python allows single underscores between digits.
std::optional<std::string> without_underscores(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool between = i > 0 && i + 1 < text.size() &&
                         std::isalnum(static_cast<unsigned char>(text[i - 1])) &&
                         std::isalnum(static_cast<unsigned char>(text[i + 1]));
    if (text[i] != '_') {
      out += text[i];
    } else if (!between) {
      return std::nullopt;
    }
  }
  return out;
}

// Python's int(text, base); returns nothing if the text is not an integer.
std::optional<int64_t> parse_int(std::string_view text, int base) {
  std::optional<std::string> digits = without_underscores(strip(text, Sides::kBoth));
  if (!digits || digits->empty()) return std::nullopt;
  const bool is_negative = (*digits)[0] == '-';
  if (is_negative || (*digits)[0] == '+') digits->erase(0, 1);
  const char letter =
      digits->size() > 2 && (*digits)[0] == '0' ? static_cast<char>(std::tolower((*digits)[1])) : '\0';
  const int prefix_base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 0;
  if (prefix_base != 0 && (base == prefix_base || base == 0)) {
    digits->erase(0, 2);
    base = prefix_base;
  }
  if (base == 0) base = 10;
  if (digits->empty() || (*digits)[0] == '-') return std::nullopt;
  if (is_negative) digits->insert(0, "-");
  int64_t value = 0;
  const char* end = digits->data() + digits->size();
  const auto [stop, error] = std::from_chars(digits->data(), end, value, base);
  if (error == std::errc::result_out_of_range && stop == end)
    fail("integer " + digits->substr(0, 40) + " does not fit in 64 bits");
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

// Python's float(text); returns nothing if the text is not a number.
std::optional<double> parse_float(std::string_view text) {
  std::optional<std::string> digits = without_underscores(strip(text, Sides::kBoth));
  if (!digits || digits->empty()) return std::nullopt;
  const bool plus = (*digits)[0] == '+';
  if (plus && digits->size() > 1 && (*digits)[1] == '-') return std::nullopt;
  const char *begin = digits->data() + plus, *end = digits->data() + digits->size();
  double value = 0;
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (stop != end || begin == end) return std::nullopt;
  if (error == std::errc::result_out_of_range) return std::strtod(begin, nullptr);  // infinity or zero
  return value;
}

int64_t truncated(double value) {
  if (!(std::fabs(value) < 9223372036854775808.0))
    fail("integer overflow: " + float_repr(value) + " does not fit in 64 bits");
  return static_cast<int64_t>(value);
}

Value to_int(Call& call) {
  require_defined(call.self);
  const Value fallback = call.arg_or(0, Value(int64_t{0}));
  const int64_t base = call.int_or(1, 10);
  if (call.self.is_integral()) return Value(to_index(call.self, ""));
  std::optional<double> number;
  if (const Text* text = call.self.as<Text>()) {
    call.heap.scan(text->bytes.size());
    if (base < 0 || base == 1 || base > 36) return fallback;
    if (const auto value = parse_int(text->bytes, static_cast<int>(base))) return Value(*value);
    number = parse_float(text->bytes);
  } else if (const double* d = call.self.as<double>()) {
    number = *d;
  }
  if (!number || !std::isfinite(*number)) return fallback;
  return Value(truncated(*number));
}

Value to_float(Call& call) {
  require_defined(call.self);
  if (call.self.is_number()) return Value(to_double(call.self));
  const Text* text = call.self.as<Text>();
  if (text != nullptr) call.heap.scan(text->bytes.size());
  const std::optional<double> number = text != nullptr ? parse_float(text->bytes) : std::nullopt;
  return number ? Value(*number) : call.arg_or(0, Value(0.0));
}

Value require_number(const Value& value) {
  require_defined(value);
  if (!value.is_number()) fail("a number is required, not '" + std::string(type_name(value)) + "'");
  return value;
}

Value absolute(Call& call) {
  const Value value = require_number(call.self);
  if (value.is<double>()) return Value(std::fabs(*value.as<double>()));
  return to_index(value, "") < 0 ? negative(value) : Value(to_index(value, ""));
}

// Ties go to the even neighbour of the exact binary value, as in Python.
Value round_common(const Value& value, int64_t precision) {
  if (value.is_integral()) {
    const int64_t number = to_index(value, "");
    if (precision >= 0) return Value(number);
    if (precision < -18) return Value(int64_t{0});
    int64_t unit = 1;
    for (int64_t i = 0; i < -precision; ++i) unit *= 10;
    const int64_t rest = (number % unit + unit) % unit, down = number - rest, half = unit / 2;
    const bool up = rest > half || (rest == half && (down / unit) % 2 != 0);
    return Value(up ? down + unit : down);
  }
  const double number = *value.as<double>();
  if (!std::isfinite(number) || precision > 320) return value;
  if (precision < -308) return Value(std::copysign(0.0, number));
  char buffer[700];
  if (precision >= 0) {
    std::snprintf(buffer, sizeof buffer, "%.*f", static_cast<int>(precision), number);
    return Value(std::strtod(buffer, nullptr));
  }
  const double unit = std::pow(10.0, static_cast<double>(-precision));
  return Value(std::nearbyint(number / unit) * unit);
}

Value round_filter(Call& call) {
  const Value value = require_number(call.self);
  const int64_t precision = call.int_or(0, 0);
  const std::string_view method =
      call.has(1) ? require_text(call.arg(1), "method") : std::string_view("common");
  if (method == "common") return round_common(value, precision);
  if (method != "ceil" && method != "floor") fail("method must be common, ceil or floor");
  const double scale = std::pow(10.0, static_cast<double>(precision)), scaled = to_double(value) * scale;
  return Value((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

Value default_filter(Call& call) {
  const bool use = call.self.is<Undefined>() || (call.truth_or(1, false) && !truth(call.self));
  return use ? call.arg_or(0, text_value("")) : call.self;
}

Value attr(Call& call) {
  const std::string_view name = require_text(call.arg(0), "name");
  const Value value = call.interpreter.attribute(call.self, name);
  const bool is_key = call.self.dict() != nullptr && find_method(call.self, name) == nullptr;
  return is_key ? missing_member(call.heap, call.self, call.arg(0)) : value;
}

constexpr Builtin kNumberFilters[] = {
    {"int", "default base", 0, to_int},
    {"float", "default", 0, to_float},
    {"abs", "", 0, absolute},
    {"round", "precision method", 0, round_filter},
    {"default", "default_value boolean", 0, default_filter},
    {"d", "default_value boolean", 0, default_filter},
    {"attr", "name", 1, attr},
};

}  // namespace

std::span<const Builtin> number_filters() { return kNumberFilters; }

}  // namespace fp4moe::jinja
