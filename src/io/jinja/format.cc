// printf-style % and str.format.
#include <cmath>
#include <cstdio>

#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

constexpr int64_t kMaxWidth = 1 << 20;  // maximum width of a formatted field

struct Spec {
  std::string_view fill = " ";
  char align = '\0';  // '<', '>', '^', '=' or '\0' (not given)
  char sign = '-';
  bool alternate = false, zero = false;
  bool thousands = false;
  int64_t width = 0, precision = -1;
  char type = '\0';
};

int64_t read_width(std::string_view text, size_t& at) {
  int64_t value = 0;
  for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
    value = value * 10 + (text[at] - '0');
    if (value > kMaxWidth) fail("format width or precision is more than " + std::to_string(kMaxWidth));
  }
  return value;
}

std::string with_thousands(std::string digits) {
  const size_t end = digits.find_first_not_of("0123456789");
  for (size_t at = end == std::string::npos ? digits.size() : end; at > 3; at -= 3)
    digits.insert(at - 3, ",");
  return digits;
}

std::string float_digits(double value, const Spec& spec) {
  const bool percent = spec.type == '%';
  const char type = percent ? 'f' : spec.type;
  if (spec.type == '\0' && spec.precision < 0) return float_repr(value);
  const std::string format = std::string(spec.alternate ? "%#" : "%") + ".*" + (type == '\0' ? 'g' : type);
  const int precision = spec.precision < 0 ? 6 : static_cast<int>(spec.precision);
  std::string digits(static_cast<size_t>(
                         std::snprintf(nullptr, 0, format.c_str(), precision, percent ? value * 100 : value)),
                     '\0');
  std::snprintf(digits.data(), digits.size() + 1, format.c_str(), precision, percent ? value * 100 : value);
  return percent ? digits + "%" : digits;
}

std::string integer_digits(uint64_t magnitude, const Spec& spec) {
  char buffer[72];
  if (spec.type == 'b') {
    std::string digits;
    for (; magnitude > 0 || digits.empty(); magnitude >>= 1)
      digits.insert(digits.begin(), magnitude & 1 ? '1' : '0');
    return (spec.alternate ? "0b" : "") + digits;
  }
  const char* format = spec.type == 'x' ? "%lx" : spec.type == 'X' ? "%lX" : spec.type == 'o' ? "%lo" : "%lu";
  std::snprintf(buffer, sizeof buffer, format, magnitude);
  const char* prefix = spec.type == 'x' ? "0x" : spec.type == 'X' ? "0X" : spec.type == 'o' ? "0o" : "";
  std::string digits = buffer;
  return (spec.alternate ? prefix : "") + digits;
}

// Returns the sign and digits, padded to the width.
std::string padded_number(bool is_negative, std::string digits, const Spec& spec) {
  if (spec.thousands) digits = with_thousands(std::move(digits));
  const std::string sign = is_negative ? "-" : spec.sign == '-' ? "" : std::string(1, spec.sign);
  const int64_t pad = spec.width - static_cast<int64_t>(sign.size() + num_points(digits));
  if (pad <= 0) return sign + digits;
  const auto fill = [&](int64_t count) {
    std::string out;
    for (int64_t i = 0; i < count; ++i) out += spec.zero && spec.align == '\0' ? "0" : spec.fill;
    return out;
  };
  if (spec.align == '<') return sign + digits + fill(pad);
  if (spec.align == '^') return fill(pad / 2) + sign + digits + fill(pad - pad / 2);
  if (spec.align == '=' || (spec.zero && spec.align == '\0')) return sign + fill(pad) + digits;
  return fill(pad) + sign + digits;
}

std::string padded_text(std::string_view text, const Spec& spec) {
  if (spec.precision >= 0) text = text.substr(0, byte_position(text, static_cast<size_t>(spec.precision)));
  const int64_t pad = spec.width - static_cast<int64_t>(num_points(text));
  std::string left, right;
  for (int64_t i = 0; i < pad; ++i) {
    const bool to_left = spec.align == '>' || (spec.align == '^' && i < pad / 2);
    (to_left ? left : right) += spec.fill;
  }
  return left + std::string(text) + right;
}

bool is_float_type(char type) {
  return type != '\0' && std::string_view("eEfFgG%").find(type) != std::string_view::npos;
}

std::string format_number(const Value& value, const Spec& spec) {
  if (value.is_integral() && !is_float_type(spec.type)) {
    const int64_t i = to_index(value, "");
    const uint64_t magnitude = i < 0 ? 0 - static_cast<uint64_t>(i) : static_cast<uint64_t>(i);
    std::string digits = integer_digits(magnitude, spec);
    if (spec.precision > static_cast<int64_t>(digits.size()))
      digits.insert(0, static_cast<size_t>(spec.precision) - digits.size(), '0');
    return padded_number(i < 0, std::move(digits), spec);
  }
  const double d = to_double(value);
  return padded_number(std::signbit(d) && !std::isnan(d), float_digits(std::fabs(d), spec), spec);
}

// Applies the conversions, such as %-5.2f, in a % format.
class PercentFormat {
 public:
  PercentFormat(Heap& heap, const Text& format, const Value& argument)
      : heap_(heap), format_(format), argument_(argument), text_(format.bytes) {
    const Sequence* s = argument.sequence();
    if (s != nullptr && s->type == SequenceType::kTuple) tuple_ = s;
  }

  Value run() {
    std::string out;
    while (at_ < text_.size()) {
      const size_t percent = std::min(text_.find('%', at_), text_.size());
      out += text_.substr(at_, percent - at_);
      at_ = percent + 1;
      if (percent < text_.size()) out += convert();
      heap_.checked_bytes(out.size(), 1);
    }
    // Python treats anything with subscripts, except tuples and text, as a mapping, which may go unused.
    const bool mapping =
        argument_.dict() != nullptr || argument_.is<Undefined>() ||
        (argument_.sequence() != nullptr && argument_.sequence()->type <= SequenceType::kRange);
    const bool all_used = tuple_ != nullptr ? used_ == tuple_->items.size() : used_ > 0 || mapping;
    if (!all_used) fail("not all arguments converted during string formatting");
    return heap_text(heap_, out, format_.safe);
  }

 private:
  const Value& next_argument() {
    if (tuple_ != nullptr) {
      if (used_ == tuple_->items.size()) fail("not enough arguments for format string");
      return tuple_->items[used_++];
    }
    if (used_++ > 0) fail("not enough arguments for format string");
    return argument_;
  }

  Value read_key() {
    const size_t end = text_.find(')', at_);
    if (end == std::string_view::npos) fail("incomplete format key");
    if (argument_.dict() == nullptr) fail("format requires a mapping");
    const std::string_view key = text_.substr(at_ + 1, end - at_ - 1);
    const Value* value = find(heap_, *argument_.dict(), text_value(key));
    if (value == nullptr) fail("no key " + quoted(key) + " for the format");
    at_ = end + 1;
    return *value;
  }

  int64_t read_size() {
    if (at_ >= text_.size() || text_[at_] != '*') return read_width(text_, at_);
    ++at_;
    const int64_t size = to_index(next_argument(), "* in a format");
    if (size < 0 || size > kMaxWidth)
      fail("format width or precision is more than " + std::to_string(kMaxWidth));
    return size;
  }

  std::string convert() {
    Spec spec{.align = '>'};
    Value keyed;
    bool has_key = false;
    if (at_ < text_.size() && text_[at_] == '(') {
      keyed = read_key();
      has_key = true;
    }
    for (; at_ < text_.size() && std::string_view("-+ #0").find(text_[at_]) != std::string_view::npos;
         ++at_) {
      const char flag = text_[at_];
      if (flag == '-') spec.align = '<';
      if (flag == '+' || (flag == ' ' && spec.sign != '+')) spec.sign = flag;
      if (flag == '#') spec.alternate = true;
      if (flag == '0') spec.zero = true;
    }
    spec.width = read_size();
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      spec.precision = read_size();
    }
    if (at_ >= text_.size()) fail("incomplete format");
    spec.type = text_[at_++];
    if (spec.type == '%') return "%";
    return convert_value(has_key ? keyed : next_argument(), spec);
  }

  std::string convert_value(const Value& value, Spec& spec) {
    if (spec.type == 's' || spec.type == 'r' || spec.type == 'a') {
      std::string text = spec.type == 's' ? to_text(heap_, value) : to_repr(heap_, value);
      if (format_.safe && !(value.is<Text>() && value.as<Text>()->safe)) text = escape_html(text);
      return padded_text(text, spec);
    }
    if (spec.type == 'c') return padded_text(character(value), spec);
    const bool floating = is_float_type(spec.type) && spec.type != '%';
    const bool integral = std::string_view("diuxXo").find(spec.type) != std::string_view::npos;
    if (!floating && !integral) fail("unsupported format character '" + std::string(1, spec.type) + "'");
    require_defined(value);
    if (!value.is_number())
      fail(std::string("%") + spec.type + " format: a real number is required, not " +
           std::string(type_name(value)));
    if (spec.zero && spec.align == '>') spec.align = '\0';
    if (floating || value.is_integral()) return format_number(value, spec);
    const double d = *value.as<double>();
    if (!(std::fabs(d) < 9.2e18)) fail("integer overflow: " + float_repr(d) + " does not fit in 64 bits");
    return format_number(Value(static_cast<int64_t>(d)), spec);
  }

  std::string character(const Value& value) const {
    std::string out;
    if (const Text* text = value.as<Text>()) {
      out = text->bytes;
    } else {
      const int64_t point = to_index(value, "%c");
      if (point < 0 || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000))
        fail("%c arg not in range(0x110000)");
      append_utf8(out, static_cast<char32_t>(point));
    }
    if (num_points(out) != 1) fail("%c requires int or char");
    return out;
  }

  Heap& heap_;
  const Text& format_;
  const Value& argument_;
  const Sequence* tuple_ = nullptr;
  std::string_view text_;
  size_t at_ = 0, used_ = 0;
};

Spec parse_spec(std::string_view text) {
  Spec spec;
  size_t at = 0;
  const auto is_align = [&](size_t i) {
    return i < text.size() && std::string_view("<>^=").find(text[i]) != std::string_view::npos;
  };
  size_t after_fill = 0;
  if (!text.empty()) next_point(text, after_fill);
  if (is_align(after_fill)) {
    spec.fill = text.substr(0, after_fill);
    spec.align = text[after_fill];
    at = after_fill + 1;
  } else if (is_align(0)) {
    spec.align = text[0];
    at = 1;
  }
  if (at < text.size() && std::string_view("+- ").find(text[at]) != std::string_view::npos)
    spec.sign = text[at++];
  if (at < text.size() && text[at] == '#') spec.alternate = true, ++at;
  if (at < text.size() && text[at] == '0') spec.zero = true, ++at;
  spec.width = read_width(text, at);
  if (at < text.size() && text[at] == ',') spec.thousands = true, ++at;
  if (at < text.size() && text[at] == '.') spec.precision = read_width(text, ++at);
  if (at < text.size()) spec.type = text[at++];
  if (at != text.size()) fail("invalid format specifier " + quoted(text));
  return spec;
}

std::string format_value(Heap& heap, const Value& value, std::string_view spec_text) {
  const Spec spec = parse_spec(spec_text);
  if (value.is_number() && !(value.is<bool>() && spec_text.empty())) {
    const std::string_view legal = value.is_integral() ? "bcdoxXneEfFgG%" : "neEfFgG%";
    if (spec.type != '\0' && legal.find(spec.type) == std::string_view::npos)
      fail("unknown format code '" + std::string(1, spec.type) + "' for '" + std::string(type_name(value)) +
           "'");
    return format_number(value, spec);
  }
  if (!value.is<Text>() && !spec_text.empty())
    fail("unsupported format string passed to " + std::string(type_name(value)) + ".__format__");
  if (spec.type != '\0' && spec.type != 's')
    fail("unknown format code '" + std::string(1, spec.type) + "' for 'str'");
  return padded_text(to_text(heap, value), spec);
}

// Returns the value of a replacement field such as "0.name[key]".
Value field_value(Call& call, std::string_view field, size_t& next) {
  const size_t end = std::min(field.find_first_of(".["), field.size());
  const std::string_view first = field.substr(0, end);
  Value value;
  if (first.empty() || all_of(first, CharClass::kDigit)) {
    size_t at = 0;
    const size_t index = first.empty() ? next++ : static_cast<size_t>(read_width(first, at));
    if (index >= call.given.positional.size())
      fail("Replacement index " + std::to_string(index) + " out of range for positional args tuple");
    value = call.given.positional[index];
  } else {
    const Value* named = nullptr;
    for (const auto& [name, given] : call.given.named)
      if (name == first) named = &given;
    if (named == nullptr) fail("no argument " + quoted(first) + " for the format");
    value = *named;
  }
  for (field = field.substr(end); !field.empty();) {
    const bool bracket = field[0] == '[';
    const size_t stop = bracket ? field.find(']') : std::min(field.find_first_of(".[", 1), field.size());
    if (stop == std::string_view::npos) fail("expected ']' before end of string");
    const std::string_view name = field.substr(1, stop - 1);
    size_t at = 0;
    const bool is_index = bracket && all_of(name, CharClass::kDigit);
    value = is_index  ? call.interpreter.item(value, Value(read_width(name, at)))
            : bracket ? call.interpreter.item(value, text_value(name))
                      : call.interpreter.attribute(value, name);
    field = field.substr(bracket ? stop + 1 : stop);
  }
  return value;
}

}  // namespace

Value format_percent(Heap& heap, const Text& format, const Value& argument) {
  return PercentFormat(heap, format, argument).run();
}

Value format_braces(Call& call, const Text& format) {
  const std::string_view text = format.bytes;
  std::string out;
  size_t next = 0;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at++];
    if (c != '{' && c != '}') {
      out += c;
    } else if (at < text.size() && text[at] == c) {
      out += text[at++];
    } else {
      const size_t end = c == '{' ? text.find('}', at) : std::string_view::npos;
      if (end == std::string_view::npos) fail(std::string("Single '") + c + "' encountered in format string");
      std::string_view field = text.substr(at, end - at), spec;
      at = end + 1;
      if (const size_t colon = field.find(':'); colon != std::string_view::npos) {
        spec = field.substr(colon + 1);
        field = field.substr(0, colon);
      }
      if (field.find_first_of("{") != std::string_view::npos || spec.find('{') != std::string_view::npos)
        fail("nested replacement fields are not supported");
      const size_t bang = field.find('!');
      const std::string_view conversion = bang == std::string_view::npos ? "" : field.substr(bang + 1);
      const Value value = field_value(call, field.substr(0, bang), next);
      if (!conversion.empty() && conversion != "r" && conversion != "s")
        fail("unknown conversion " + quoted(conversion));
      const std::string converted = conversion == "r" ? to_repr(call.heap, value) : to_text(call.heap, value);
      const std::string formatted =
          format_value(call.heap, conversion.empty() ? value : text_value(converted), spec);
      const bool plain = format.safe && !(value.is<Text>() && value.as<Text>()->safe);
      out += plain ? escape_html(formatted) : formatted;
    }
    call.heap.checked_bytes(out.size(), 1);
  }
  return heap_text(call.heap, out, format.safe);
}

}  // namespace fp4moe::jinja
