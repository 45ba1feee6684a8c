#include "engine/grammar/schema_bounds.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
constexpr double kMaxNumberBound = 1e12;  // xgrammar compares decimals of bounded numbers exactly below this
constexpr double kDecimals = 1e6;         // and to 6 places
constexpr int64_t kMaxMultiple = 1024;    // xgrammar's limits for multipleOf of integers
constexpr int64_t kMaxMultipleRange = 10000;

constexpr std::array kCounts = {"minLength",     "maxLength",     "minItems",    "maxItems",
                                "minProperties", "maxProperties", "minContains", "maxContains"};
constexpr std::array kBounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};

Status check_count(const SchemaJson& schema, const std::string& path, const char* key) {
  const SchemaJson* count = member(schema, key);
  if (count == nullptr || (count->is_number_unsigned() && count->get<uint64_t>() <= kMaxCount)) return {};
  return schema_error(path, key, schema, "must be an integer of at least 0 and at most 2147483647");
}

Status check_order(const SchemaJson& schema, const std::string& path, const char* low_key,
                   const char* high_key, bool may_be_equal) {
  const SchemaJson *low = member(schema, low_key), *high = member(schema, high_key);
  if (low == nullptr || high == nullptr || !low->is_number() || !high->is_number()) return {};
  if (*low < *high || (may_be_equal && *low == *high)) return {};
  return schema_error(
      path, low_key, schema,
      std::string("must be ") + (may_be_equal ? "at most " : "less than ") + high_key + " " + high->dump());
}

Status check_orders(const SchemaJson& schema, const std::string& path) {
  FP4MOE_RETURN_IF_ERROR(check_order(schema, path, "minLength", "maxLength", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, path, "minItems", "maxItems", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, path, "minProperties", "maxProperties", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, path, "minContains", "maxContains", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, path, "minimum", "maximum", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, path, "minimum", "exclusiveMaximum", false));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, path, "exclusiveMinimum", "maximum", false));
  return check_order(schema, path, "exclusiveMinimum", "exclusiveMaximum", false);
}

bool fits_int64(const SchemaJson& number) {
  if (number.is_number_unsigned())
    return number.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  return number.is_number_integer() || std::abs(number.get<double>()) < 9e18;
}

// Bounds of integers are compared as integers, those of other numbers as decimals.
Status check_precision(const SchemaJson& schema, const std::string& path, unsigned types) {
  for (const char* key : kBounds) {
    const SchemaJson* bound = member(schema, key);
    if (bound == nullptr) continue;
    const double value = bound->get<double>();
    if ((types & kFractionType) != 0) {
      const double scaled = value * kDecimals, rounding = 1e-6 + 1e-15 * std::abs(scaled);
      if (std::abs(value) > kMaxNumberBound || std::abs(scaled - std::round(scaled)) > rounding)
        return schema_error(path, key, schema,
                            "must be between -1e12 and 1e12 and have at most 6 decimal places, because other "
                            "bounds are not enforced exactly; round it, or leave it out");
    } else if (!fits_int64(*bound)) {
      return schema_error(path, key, schema, "of an integer must be between -9e18 and 9e18; leave it out");
    } else if (value != std::floor(value)) {
      return schema_error(path, key, schema, "of an integer must be an integer");
    }
  }
  return {};
}

// The smallest and the largest integer that the bounds allow.
std::pair<int64_t, int64_t> integer_range(const SchemaJson& schema) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 4;
  std::pair<int64_t, int64_t> range{-kMost, kMost};
  const auto bound = [&](const char* key, int64_t otherwise, int64_t shift) {
    const SchemaJson* value = member(schema, key);
    if (value == nullptr) return otherwise;
    return static_cast<int64_t>(
               std::clamp(value->get<double>(), -static_cast<double>(kMost), static_cast<double>(kMost))) +
           shift;
  };
  range.first = std::max(bound("minimum", -kMost, 0), bound("exclusiveMinimum", -kMost, 1));
  range.second = std::min(bound("maximum", kMost, 0), bound("exclusiveMaximum", kMost, -1));
  return range;
}

Status check_multiple(const SchemaJson& schema, const std::string& path, unsigned types) {
  const SchemaJson* step = member(schema, "multipleOf");
  if (step == nullptr || (types & (kIntegerType | kFractionType)) == 0) return {};
  if ((types & kFractionType) != 0)
    return schema_error(
        path, "multipleOf", schema,
        "cannot be enforced for \"type\": \"number\"; use \"type\": \"integer\" with a smaller "
        "unit, or round the output");
  const double value = step->get<double>();
  if (value != std::floor(value) || value > kMaxMultiple)
    return schema_error(path, "multipleOf", schema,
                        "of an integer must be an integer of at most " + std::to_string(kMaxMultiple));
  const bool has_low = schema.contains("minimum") || schema.contains("exclusiveMinimum");
  const bool has_high = schema.contains("maximum") || schema.contains("exclusiveMaximum");
  if (!has_low && !has_high) return {};
  const auto [low, high] = integer_range(schema);
  if (has_low != has_high || high - low > kMaxMultipleRange)
    return schema_error(path, "multipleOf", schema,
                        "cannot be enforced together with these bounds; use both a minimum and a maximum, at "
                        "most " +
                            std::to_string(kMaxMultipleRange) + " apart, or no bounds");
  const auto unit = static_cast<int64_t>(value);
  for (int64_t i = low; i <= high; ++i)
    if (i % unit == 0) return {};
  return schema_error(path, "multipleOf", schema, "has no multiple between the bounds");
}

constexpr uint32_t kFirstSurrogate = 0xd800, kFirstLowSurrogate = 0xdc00, kLastSurrogate = 0xdfff;
constexpr uint32_t kLastCharacter = 0x10ffff;
constexpr size_t kUnitBytes = 6;      // of \uXXXX
constexpr size_t kMostHexDigits = 8;  // of \u{...}, leading zeros included

// The value of up to `most` hexadecimal digits from `begin` on.
uint32_t read_hex(const std::string& text, size_t begin, size_t most) {
  uint32_t value = 0;
  for (size_t i = begin; i < std::min(begin + most, text.size()); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (std::isxdigit(c) == 0) break;
    value = value * 16 + static_cast<uint32_t>(std::isdigit(c) != 0 ? c - '0' : std::tolower(c) - 'a' + 10);
  }
  return value;
}

std::string escaped(uint32_t c) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "\\u{%x}", c);
  return text.data();
}

// Returns the code unit of the escape \uXXXX at `at`; 0 if other text is there.
uint32_t escaped_unit(const std::string& text, size_t at) {
  if (at + kUnitBytes > text.size() || text.compare(at, 2, "\\u") != 0) return 0;
  for (size_t i = at + 2; i < at + kUnitBytes; ++i)
    if (std::isxdigit(static_cast<unsigned char>(text[i])) == 0) return 0;
  return read_hex(text, at + 2, kUnitBytes - 2);
}

// Returns the character of the two escaped surrogates at `at`; 0 if other text is there.
uint32_t surrogate_pair(const std::string& text, size_t at) {
  const uint32_t high = escaped_unit(text, at);
  if (high < kFirstSurrogate || high >= kFirstLowSurrogate) return 0;
  const uint32_t low = escaped_unit(text, at + kUnitBytes);
  if (low < kFirstLowSurrogate || low > kLastSurrogate) return 0;
  return 0x10000 + (high - kFirstSurrogate) * 0x400 + (low - kFirstLowSurrogate);
}

// Reads a pattern once, from left to right.
class PatternCheck {
 public:
  // is_in_json: of a JSON string, and not of the whole output.
  PatternCheck(std::string pattern, const std::string& place, bool is_in_json)
      : text_(std::move(pattern)), place_(place), is_in_json_(is_in_json) {}

  Status check() {
    while (at_ < text_.size()) FP4MOE_RETURN_IF_ERROR(read_next());
    return depth_ == 0 ? Status() : refuse("has a ( without )");
  }

 private:
  // A character that JSON text has to escape.
  bool needs_escape(uint32_t c) const { return is_in_json_ && (c < 0x20 || c == '"' || c == '\\'); }
  Status refuse(const std::string& reason) const {
    return invalid_argument(short_path(place_) + " " + in_quotes(text_) + " " + reason);
  }
  Status unprintable() const {
    return refuse(
        "needs a quote, a backslash or a control character, which patterns of JSON strings cannot "
        "match; leave it out of the pattern");
  }

  Status read_next() {
    const char c = text_[at_];
    if (c == '*' || c == '+' || c == '?' || c == '{') return read_repetition();
    if (c == '(') return read_group();
    const bool is_anchor = c == '^' || c == '$';
    can_repeat_ = !is_anchor && c != '|';
    if (c == '\\') return read_escape();
    if (c == '[') return read_class();
    if (c == '^' && at_ != 0) return refuse("has ^ after its start, where it would be ignored; remove it");
    if (c == '$' && at_ + 1 != text_.size())
      return refuse("has $ before its end, where it would be ignored; remove it");
    if (c == ')' && --depth_ < 0) return refuse("has a ) without (");
    if (c == ']' || c == '}') return refuse(std::string("has a ") + c + " without its opening bracket");
    if (needs_escape(static_cast<unsigned char>(c))) return unprintable();
    ++at_;
    return {};
  }

  // *, +, ?, {m}, {m,} or {m,n}, also followed by ? (as few as possible, which matches the same strings).
  Status read_repetition() {
    if (!can_repeat_) return refuse("has a repetition of nothing; write what is repeated before it");
    can_repeat_ = false;
    const char c = text_[at_++];
    if (c == '{') {
      const size_t end = text_.find('}', at_);
      if (end == std::string::npos) return refuse("has a { without }");
      const std::string_view counts = std::string_view(text_).substr(at_, end - at_);
      const size_t comma = std::min(counts.find(','), counts.size());
      const std::string_view low = counts.substr(0, comma);
      const std::string_view high = comma == counts.size() ? low : counts.substr(comma + 1);
      const bool is_open = comma + 1 == counts.size();
      if (!is_count(low) || (!is_open && (!is_count(high) || number(low) > number(high))))
        return refuse("has a { that is not {m}, {m,} or {m,n} with m at most n");
      at_ = end + 1;
    }
    if (at_ < text_.size() && text_[at_] == '?') ++at_;
    return {};
  }
  static bool is_count(std::string_view text) {
    return !text.empty() && text.size() <= 9 &&
           text.find_first_not_of("0123456789") == std::string_view::npos;
  }
  static int64_t number(std::string_view digits) { return std::stoll(std::string(digits)); }

  Status read_escape() {
    const char c = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
    if (c == '\0') return refuse("ends with a backslash; remove it");
    FP4MOE_RETURN_IF_ERROR(check_escape(c));
    FP4MOE_RETURN_IF_ERROR(check_character(at_));
    if (needs_escape(escaped_character(at_))) return unprintable();
    at_ += escape_length(at_);
    return {};
  }

  // The letter or digit after a backslash.
  Status check_escape(char c) const {
    if (c == 'b' || c == 'B')
      return refuse("has \\b, which cannot be enforced; write the characters instead");
    if ((c >= '1' && c <= '9') || c == 'k')
      return refuse("has a back-reference, which cannot be enforced; repeat the part instead");
    if (c == 'p' || c == 'P')
      return refuse("has \\p, which cannot be enforced; list the characters in [] instead");
    constexpr std::string_view kKnown = "dDwWsSnrtfv0xuc";
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 && kKnown.find(c) == std::string_view::npos)
      return refuse(std::string("has \\") + c + ", which means nothing; remove the backslash");
    return {};
  }

  // Whether the escape sequence at `begin` has a code point that UTF-8 can encode.
  Status check_character(size_t begin) const {
    if (text_[begin + 1] != 'u') return {};
    const size_t first = begin + 2;
    const bool is_braced = first < text_.size() && text_[first] == '{';
    const uint32_t c = is_braced ? hex(first + 1, kMostHexDigits) : hex(first, 4);
    const size_t end = begin + escape_length(begin);
    const bool is_long = is_braced && end - first > kMostHexDigits + 2;
    if (!is_long && c <= kLastCharacter && (c < kFirstSurrogate || c > kLastSurrogate)) return {};
    return refuse("has " + text_.substr(begin, end - begin) +
                  ", which is no Unicode character; use \\u{0} to \\u{d7ff}, \\u{e000} to \\u{10ffff}, or a "
                  "pair of surrogates such as \\ud83d\\ude00");
  }

  // The character of an escape sequence at `begin`, or 0x110000 for a class such as \d.
  uint32_t escaped_character(size_t begin) const {
    const char c = text_[begin + 1];
    if (c == 'n' || c == 'r' || c == 't' || c == 'f' || c == 'v' || c == '0' || c == 'c') return '\n';
    if (c == 'x') return hex(begin + 2, 2);
    if (c == 'u' && begin + 2 < text_.size() && text_[begin + 2] == '{') return hex(begin + 3, 6);
    if (c == 'u') return hex(begin + 2, 4);
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ? 0x110000U : static_cast<unsigned char>(c);
  }

  size_t escape_length(size_t begin) const {
    const char c = text_[begin + 1];
    if (c == 'u' && begin + 2 < text_.size() && text_[begin + 2] == '{')
      return std::min(text_.find('}', begin), text_.size() - 1) + 1 - begin;
    return c == 'x' ? 4 : c == 'u' ? 6 : c == 'c' ? 3 : 2;
  }

  uint32_t hex(size_t begin, size_t most) const { return read_hex(text_, begin, most); }

  // A class needs one character that JSON text does not escape.
  Status read_class() {
    size_t end = at_ + 1;
    bool is_usable = end < text_.size() && text_[end] == '^';
    if (is_usable) ++end;
    const size_t first = end;
    std::optional<uint32_t> low;  // the character before a -
    while (end < text_.size() && text_[end] != ']') {
      const bool is_escape = text_[end] == '\\' && end + 1 < text_.size();
      if (is_escape) FP4MOE_RETURN_IF_ERROR(check_escape(text_[end + 1]));
      if (is_escape) FP4MOE_RETURN_IF_ERROR(check_character(end));
      const uint32_t c = is_escape ? escaped_character(end) : static_cast<unsigned char>(text_[end]);
      is_usable = is_usable || !needs_escape(c);
      if (low.has_value() && c < *low)
        return refuse("has a range in [] whose end is before its start; swap the two");
      end += is_escape ? escape_length(end) : 1;
      const bool is_range =
          !low.has_value() && end + 1 < text_.size() && text_[end] == '-' && text_[end + 1] != ']';
      low = is_range ? std::optional(c) : std::nullopt;
      if (is_range) ++end;
    }
    if (end >= text_.size()) return refuse("has a [ without ]");
    if (end == first) return refuse("has [] or [^], which cannot be enforced; write the characters in []");
    if (!is_usable) return unprintable();
    at_ = end + 1;
    return {};
  }

  Status read_group() {
    ++depth_;
    can_repeat_ = false;
    if (at_ + 1 < text_.size() && text_[at_ + 1] == '?') {
      const std::string_view modifier = std::string_view(text_).substr(at_ + 2, 2);
      if (modifier.starts_with('=') || modifier.starts_with('!') || modifier == "<=" || modifier == "<!")
        return refuse("looks ahead or behind, which cannot be enforced; write the alternatives with |");
      if (!modifier.starts_with(':') && !modifier.starts_with('<'))
        return refuse("has a group with (?, which cannot be enforced; use (?:...) or (...)");
      if (modifier.starts_with('<')) at_ = std::min(text_.find('>', at_), text_.size() - 3);
      at_ += modifier.starts_with('<') ? 1 : 3;
      return {};
    }
    ++at_;
    return {};
  }

  const std::string text_;  // ASCII
  const std::string place_;
  const bool is_in_json_;
  size_t at_ = 0;
  int depth_ = 0;            // open groups
  bool can_repeat_ = false;  // the last part can be repeated
};

}  // namespace

Status check_bounds(const SchemaJson& schema, const std::string& path) {
  for (const char* key : kCounts) FP4MOE_RETURN_IF_ERROR(check_count(schema, path, key));
  for (const char* key : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
    if (const SchemaJson* bound = member(schema, key); bound != nullptr && !bound->is_number())
      return schema_error(path, key, schema, "must be a number");
  FP4MOE_RETURN_IF_ERROR(check_orders(schema, path));
  if (const SchemaJson* step = member(schema, "multipleOf"); step != nullptr && *step <= 0)
    return schema_error(path, "multipleOf", schema, "must be above 0");
  const unsigned types = schema.contains("type") ? declared_types(schema) : 0U;
  if ((types & kIntegerType) != 0) FP4MOE_RETURN_IF_ERROR(check_precision(schema, path, types));
  FP4MOE_RETURN_IF_ERROR(check_multiple(schema, path, types));
  if ((types & (kIntegerType | kFractionType)) != kIntegerType) return {};
  if (const auto [low, high] = integer_range(schema); low > high)
    return schema_error(path, schema.contains("exclusiveMinimum") ? "exclusiveMinimum" : "minimum", schema,
                        "leaves no integer below the maximum");
  return {};
}

Status check_pattern(const std::string& pattern, const std::string& place) {
  return PatternCheck(ascii_pattern(pattern), place, /*is_in_json=*/true).check();
}

Status check_regex(const std::string& pattern) {
  return PatternCheck(ascii_pattern(pattern), "the regular expression", /*is_in_json=*/false).check();
}

std::string join_surrogates(const std::string& pattern) {
  std::string joined;
  for (size_t i = 0; i < pattern.size();) {
    if (const uint32_t c = surrogate_pair(pattern, i); c != 0) {
      joined += escaped(c);
      i += 2 * kUnitBytes;
      continue;
    }
    const size_t length = pattern[i] == '\\' ? 2 : 1;  // the second character is no begin of an escape
    joined.append(pattern, i, length);
    i += length;
  }
  return joined;
}

std::string ascii_pattern(const std::string& given) {
  const std::string pattern = join_surrogates(given);
  std::string result;
  for (size_t i = 0; i < pattern.size();) {
    const auto lead = static_cast<unsigned char>(pattern[i]);
    if (lead < 0x80) {
      result += pattern[i++];
      continue;
    }
    const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    uint32_t c = lead & (0xffU >> (length + 1));
    for (size_t k = 1; k < length && i + k < pattern.size(); ++k)
      c = c << 6 | (static_cast<unsigned char>(pattern[i + k]) & 0x3fU);
    result += escaped(c);
    i += length;
  }
  return result;
}

}  // namespace fp4moe
