#include "io/jinja/text.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdio>

namespace fp4moe::jinja {

namespace {

bool is_printable(char32_t point) {
  if (point == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(point))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

utf8proc_category_t category(char32_t point) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(point));
}

bool is_cased(char32_t point) {
  const auto c = category(point);
  return c == UTF8PROC_CATEGORY_LU || c == UTF8PROC_CATEGORY_LL || c == UTF8PROC_CATEGORY_LT;
}

bool is_alpha(char32_t point) {
  const auto c = category(point);
  return is_cased(point) || c == UTF8PROC_CATEGORY_LM || c == UTF8PROC_CATEGORY_LO;
}

bool is_digit(char32_t point) { return category(point) == UTF8PROC_CATEGORY_ND; }

void append_upper(std::string& out, char32_t point) {
  if (point == U'ß') {
    out += "SS";
  } else {
    append_utf8(out, static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(point))));
  }
}

void append_lower(std::string& out, char32_t point) {
  append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(point))));
}

void append_title(std::string& out, char32_t point) {
  if (point == U'ß') {
    out += "Ss";
  } else {
    append_utf8(out, static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(point))));
  }
}

// Moves `at` to the start of the code point before it.
void step_back(std::string_view bytes, size_t& at) {
  do --at;
  while (at > 0 && (static_cast<unsigned char>(bytes[at]) & 0xC0) == 0x80);
}

template <class Drop>
std::string_view strip_if(std::string_view bytes, Sides sides, Drop drop) {
  size_t begin = 0, end = bytes.size();
  while (sides != Sides::kRight && begin < end) {
    size_t next = begin;
    if (!drop(next_point(bytes, next))) break;
    begin = next;
  }
  while (sides != Sides::kLeft && end > begin) {
    size_t start = end, unused;
    step_back(bytes, start);
    unused = start;
    if (!drop(next_point(bytes, unused))) break;
    end = start;
  }
  return bytes.substr(begin, end - begin);
}

}  // namespace

bool is_valid_utf8(std::string_view bytes) {
  const auto* data = reinterpret_cast<const utf8proc_uint8_t*>(bytes.data());
  for (size_t at = 0; at < bytes.size();) {
    utf8proc_int32_t point = 0;
    const auto used = utf8proc_iterate(data + at, static_cast<utf8proc_ssize_t>(bytes.size() - at), &point);
    if (used <= 0) return false;
    at += static_cast<size_t>(used);
  }
  return true;
}

void append_utf8(std::string& out, char32_t point) {
  utf8proc_uint8_t buffer[4];
  const auto size = utf8proc_encode_char(static_cast<utf8proc_int32_t>(point), buffer);
  out.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(size));
}

char32_t next_point(std::string_view bytes, size_t& at) {
  const auto lead = static_cast<unsigned char>(bytes[at++]);
  if (lead < 0x80) return lead;
  const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
  char32_t point = lead & (0x3F >> more);
  for (int i = 0; i < more && at < bytes.size(); ++i)
    point = point << 6 | (static_cast<unsigned char>(bytes[at++]) & 0x3F);
  return point;
}

size_t num_points(std::string_view bytes) {
  return static_cast<size_t>(std::count_if(
      bytes.begin(), bytes.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

size_t byte_position(std::string_view bytes, size_t points) {
  size_t at = 0;
  while (points-- > 0 && at < bytes.size()) next_point(bytes, at);
  return at;
}

std::vector<std::string_view> points(std::string_view bytes) {
  std::vector<std::string_view> result;
  for (size_t at = 0; at < bytes.size();) {
    const size_t start = at;
    next_point(bytes, at);
    result.push_back(bytes.substr(start, at - start));
  }
  return result;
}

bool is_space(char32_t point) {
  return (point >= 9 && point <= 13) || (point >= 0x1C && point <= 0x20) || point == 0x85 || point == 0xA0 ||
         point == 0x1680 || (point >= 0x2000 && point <= 0x200A) || point == 0x2028 || point == 0x2029 ||
         point == 0x202F || point == 0x205F || point == 0x3000;
}

std::string_view strip(std::string_view bytes, Sides sides) { return strip_if(bytes, sides, is_space); }

std::string_view strip(std::string_view bytes, Sides sides, std::string_view chars) {
  return strip_if(bytes, sides, [&](char32_t point) {
    for (size_t at = 0; at < chars.size();)
      if (next_point(chars, at) == point) return true;
    return false;
  });
}

std::vector<std::string_view> split(std::string_view bytes, int64_t max_splits, bool from_right) {
  std::vector<std::string_view> parts;
  const Sides near = from_right ? Sides::kRight : Sides::kLeft;
  for (bytes = strip(bytes, near); !bytes.empty(); bytes = strip(bytes, near)) {
    if (max_splits >= 0 && static_cast<int64_t>(parts.size()) == max_splits) {
      parts.push_back(strip(bytes, from_right ? Sides::kLeft : Sides::kRight));
      if (parts.back().size() != bytes.size()) parts.back() = strip(bytes, near);
      break;
    }
    size_t at = from_right ? bytes.size() : 0;
    for (size_t next = at; from_right ? at > 0 : at < bytes.size(); at = next) {
      size_t probe = next;
      if (from_right) step_back(bytes, probe), next = probe;
      if (is_space(next_point(bytes, probe))) break;
      if (!from_right) next = probe;
    }
    parts.push_back(from_right ? bytes.substr(at) : bytes.substr(0, at));
    bytes = from_right ? bytes.substr(0, at) : bytes.substr(at);
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split(std::string_view bytes, std::string_view separator, int64_t max_splits,
                                    bool from_right) {
  std::vector<std::string_view> parts;
  while (max_splits < 0 || static_cast<int64_t>(parts.size()) < max_splits) {
    const size_t at = from_right ? bytes.rfind(separator) : bytes.find(separator);
    if (at == std::string_view::npos) break;
    const std::string_view before = bytes.substr(0, at), after = bytes.substr(at + separator.size());
    parts.push_back(from_right ? after : before);
    bytes = from_right ? before : after;
  }
  parts.push_back(bytes);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_lines(std::string_view bytes, bool keep_ends) {
  const auto ends_line = [](char32_t p) {
    return (p >= 10 && p <= 13) || (p >= 0x1C && p <= 0x1E) || p == 0x85 || p == 0x2028 || p == 0x2029;
  };
  std::vector<std::string_view> lines;
  for (size_t start = 0, at = 0; at < bytes.size();) {
    const size_t stop = at;
    const char32_t point = next_point(bytes, at);
    if (ends_line(point)) {
      if (point == '\r' && at < bytes.size() && bytes[at] == '\n') ++at;
      lines.push_back(bytes.substr(start, (keep_ends ? at : stop) - start));
      start = at;
    } else if (at == bytes.size()) {
      lines.push_back(bytes.substr(start));
    }
  }
  return lines;
}

std::string to_upper(std::string_view bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size();) append_upper(out, next_point(bytes, at));
  return out;
}

std::string to_lower(std::string_view bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size();) append_lower(out, next_point(bytes, at));
  return out;
}

std::string capitalize(std::string_view bytes) {
  std::string out;
  size_t at = 0;
  if (!bytes.empty()) append_title(out, next_point(bytes, at));
  return out + to_lower(bytes.substr(at));
}

std::string title(std::string_view bytes) {
  std::string out;
  bool inside = false;
  for (size_t at = 0; at < bytes.size();) {
    const char32_t point = next_point(bytes, at);
    inside ? append_lower(out, point) : append_title(out, point);
    inside = is_cased(point);
  }
  return out;
}

std::string title_filter(std::string_view bytes) {
  const auto separates = [](char32_t point) {
    return is_space(point) || std::u32string_view(U"-({[<").find(point) != std::u32string_view::npos;
  };
  std::string out;
  bool inside = false;
  for (size_t at = 0; at < bytes.size();) {
    const char32_t point = next_point(bytes, at);
    inside ? append_lower(out, point) : append_upper(out, point);
    inside = !separates(point);
  }
  return out;
}

bool all_of(std::string_view bytes, CharClass char_class) {
  bool cased = false;
  for (size_t at = 0; at < bytes.size();) {
    const char32_t p = next_point(bytes, at);
    const auto c = category(p);
    switch (char_class) {
      case CharClass::kAlpha:
        if (!is_alpha(p)) return false;
        break;
      case CharClass::kDigit:
        if (!is_digit(p)) return false;
        break;
      case CharClass::kAlnum:
        if (!is_alpha(p) && !is_digit(p)) return false;
        break;
      case CharClass::kSpace:
        if (!is_space(p)) return false;
        break;
      case CharClass::kUpper:
        if (c == UTF8PROC_CATEGORY_LL || c == UTF8PROC_CATEGORY_LT) return false;
        break;
      case CharClass::kLower:
        if (c == UTF8PROC_CATEGORY_LU || c == UTF8PROC_CATEGORY_LT) return false;
        break;
    }
    cased = cased || is_cased(p);
  }
  const bool about_case = char_class == CharClass::kUpper || char_class == CharClass::kLower;
  return about_case ? cased : !bytes.empty();
}

std::string quoted(std::string_view bytes) {
  const bool double_quotes =
      bytes.find('\'') != std::string_view::npos && bytes.find('"') == std::string_view::npos;
  const char quote = double_quotes ? '"' : '\'';
  std::string out(1, quote);
  for (size_t at = 0; at < bytes.size();) {
    const char32_t point = next_point(bytes, at);
    char escape[16];
    if (point == static_cast<unsigned char>(quote) || point == '\\') {
      out += '\\';
      out += static_cast<char>(point);
    } else if (point == '\n' || point == '\r' || point == '\t') {
      out += point == '\n' ? "\\n" : point == '\r' ? "\\r" : "\\t";
    } else if (is_printable(point)) {
      append_utf8(out, point);
    } else {
      const char* format = point < 0x100 ? "\\x%02x" : point < 0x10000 ? "\\u%04x" : "\\U%08x";
      std::snprintf(escape, sizeof escape, format, static_cast<unsigned>(point));
      out += escape;
    }
  }
  return out + quote;
}

std::string escape_html(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string replace(std::string_view bytes, std::string_view from, std::string_view to, int64_t max_count) {
  std::string out;
  size_t at = 0;
  for (int64_t n = 0; max_count < 0 || n < max_count; ++n) {
    if (from.empty()) {  // insert at both ends and between all code points
      out += to;
      if (at == bytes.size()) return out;
      const size_t start = at;
      next_point(bytes, at);
      out += bytes.substr(start, at - start);
      continue;
    }
    const size_t found = bytes.find(from, at);
    if (found == std::string_view::npos) break;
    out.append(bytes.substr(at, found - at)).append(to);
    at = found + from.size();
  }
  return out.append(bytes.substr(at));
}

int64_t count(std::string_view bytes, std::string_view part) {
  if (part.empty()) return static_cast<int64_t>(num_points(bytes)) + 1;
  int64_t n = 0;
  for (size_t at = bytes.find(part); at != std::string_view::npos; at = bytes.find(part, at + part.size()))
    ++n;
  return n;
}

}  // namespace fp4moe::jinja
