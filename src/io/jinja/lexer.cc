#include "io/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>

#include "io/jinja/error.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool starts_name(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || (c & 0x80); }
bool continues_name(char c) { return starts_name(c) || is_digit(c); }

// Like Jinja, converts every kind of line end to \n and drops one at the very end.
std::string normalised(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') continue;
    text += source[i] == '\r' ? '\n' : source[i];
  }
  if (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalised(source)), rest_(source_) {}

  std::vector<Token> run() {
    while (!rest_.empty()) read_data();
    add(TokenType::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail_here(const std::string& message) const {
    throw Error{ErrorKind::kSyntax, message, line_};
  }

  void add(TokenType type, std::string text) { tokens_.push_back({type, std::move(text), line_}); }
  void skip(size_t bytes) {
    line_ +=
        static_cast<int>(std::count(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(bytes), '\n'));
    if (bytes > 0) line_starting_ = rest_[bytes - 1] == '\n';
    rest_.remove_prefix(bytes);
  }
  void skip_space() { skip(rest_.size() - strip(rest_, Sides::kLeft).size()); }
  bool accept(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    skip(text.size());
    return true;
  }
  // Accepts the end of a block or comment. "-" also skips the white space after it; without a sign, one
  // line end is skipped.
  bool accept_end(std::string_view end) {
    const char sign = rest_.starts_with('-') || rest_.starts_with('+') ? rest_[0] : '\0';
    if (!rest_.substr(sign ? 1 : 0).starts_with(end)) return false;
    skip(end.size() + (sign ? 1 : 0));
    if (sign == '-') skip_space();
    if (sign == '\0') accept("\n");
    return true;
  }

  // Adds text before a tag, stripped according to the tag's sign ('-', '+' or 0).
  void add_data(std::string_view text, char sign, bool is_print) {
    if (sign == '-') {
      text = strip(text, Sides::kRight);
    } else if (sign != '+' && !is_print) {
      const size_t line_start = text.rfind('\n') + 1;  // npos + 1 is 0
      const std::string_view indent = text.substr(line_start);
      if ((line_start > 0 || line_starting_) && strip(indent, Sides::kLeft).empty())
        text = text.substr(0, line_start);
    }
    if (!text.empty()) add(TokenType::kData, std::string(text));
  }

  // Reads text up to the next tag, and the tag.
  void read_data() {
    size_t at = rest_.find('{');
    const auto opens = [&] {
      return at + 1 < rest_.size() && std::string_view("{%#").find(rest_[at + 1]) < 3;
    };
    while (at != std::string_view::npos && !opens()) at = rest_.find('{', at + 1);
    if (at == std::string_view::npos) {
      add(TokenType::kData, std::string(rest_));
      skip(rest_.size());
      return;
    }
    const char kind = rest_[at + 1];
    const char next = at + 2 < rest_.size() ? rest_[at + 2] : '\0';
    const char sign = next == '-' || next == '+' ? next : '\0';
    add_data(rest_.substr(0, at), sign, kind == '{');
    skip(at + (sign ? 3 : 2));
    if (kind == '#') {
      read_comment();
    } else if (kind == '%' && accept_raw_begin()) {
      read_raw();
    } else {
      read_tag(kind == '{');
    }
  }

  void read_comment() {
    const size_t end = rest_.find("#}");
    if (end == std::string_view::npos) fail_here("missing end of comment tag");
    const bool sign = end > 0 && (rest_[end - 1] == '-' || rest_[end - 1] == '+');
    skip(sign ? end - 1 : end);
    accept_end("#}");
  }

  bool accept_raw_begin() {
    std::string_view text = strip(rest_, Sides::kLeft);
    if (!text.starts_with("raw")) return false;
    text = strip(text.substr(3), Sides::kLeft);
    const bool dash = text.starts_with('-');
    if (!text.substr(dash).starts_with("%}")) return false;
    skip(rest_.size() - text.size() + dash + 2);
    if (dash) skip_space();
    return true;
  }

  void read_raw() {
    for (size_t at = rest_.find("{%"); at != std::string_view::npos; at = rest_.find("{%", at + 1)) {
      const char next = at + 2 < rest_.size() ? rest_[at + 2] : '\0';
      const char sign = next == '-' || next == '+' ? next : '\0';
      std::string_view tail = strip(rest_.substr(at + (sign ? 3 : 2)), Sides::kLeft);
      if (!tail.starts_with("endraw")) continue;
      tail = strip(tail.substr(6), Sides::kLeft);
      if (!tail.starts_with("%}") && !tail.starts_with("-%}") && !tail.starts_with("+%}")) continue;
      add_data(rest_.substr(0, at), sign, false);
      skip(rest_.size() - tail.size());
      accept_end("%}");
      return;
    }
    fail_here("missing end of raw directive");
  }

  void read_tag(bool is_print) {
    add(is_print ? TokenType::kPrintBegin : TokenType::kBlockBegin, "");
    std::string open;  // unclosed brackets
    for (;;) {
      if (open.empty() && accept_tag_end(is_print)) return;
      if (rest_.empty())
        fail_here("unexpected end of template, expected '" + std::string(is_print ? "}}" : "%}") + "'");
      if (is_space(first_point())) {
        skip_space();
      } else {
        read_token(open);
      }
    }
  }

  bool accept_tag_end(bool is_print) {
    if (is_print) {
      const bool dash = rest_.starts_with("-}}");
      if (!dash && !rest_.starts_with("}}")) return false;
      add(TokenType::kPrintEnd, "");
      skip(dash ? 3 : 2);
      if (dash) skip_space();
      return true;
    }
    if (!rest_.starts_with("%}") && !rest_.starts_with("-%}") && !rest_.starts_with("+%}")) return false;
    add(TokenType::kBlockEnd, "");
    return accept_end("%}");
  }

  char32_t first_point() const {
    size_t at = 0;
    return next_point(rest_, at);
  }

  void read_token(std::string& open) {
    const char c = rest_[0];
    if (is_digit(c)) return read_number();
    if (c == '\'' || c == '"') return read_string();
    if (starts_name(c)) {
      size_t size = 1;
      while (size < rest_.size() && continues_name(rest_[size])) ++size;
      add(TokenType::kName, std::string(rest_.substr(0, size)));
      return skip(size);
    }
    static constexpr std::array<std::string_view, 27> kOperators = {
        "//", "**", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">",
        "=",  "(",  ")",  "[",  "]",  "{",  "}", ".", ":", "|", ",", ";", "!"};
    for (const std::string_view op : kOperators) {
      if (!rest_.starts_with(op)) continue;
      if (op == "(" || op == "[" || op == "{") open += op == "(" ? ')' : op == "[" ? ']' : '}';
      if (op == ")" || op == "]" || op == "}") {
        if (open.empty()) fail_here("unexpected '" + std::string(op) + "'");
        if (open.back() != op[0])
          fail_here("unexpected '" + std::string(op) + "', expected '" + open.back() + "'");
        open.pop_back();
      }
      add(TokenType::kOperator, std::string(op));
      return skip(op.size());
    }
    std::string shown;
    append_utf8(shown, first_point());
    fail_here("unexpected character " + jinja::quoted(shown));
  }

  // Returns the end of a run of digits with single underscores between them.
  size_t digits_end(size_t at, bool (*is_wanted)(char)) const {
    while (at < rest_.size() &&
           (is_wanted(rest_[at]) || (rest_[at] == '_' && at + 1 < rest_.size() && at > 0 &&
                                     rest_[at - 1] != '_' && is_wanted(rest_[at + 1]))))
      ++at;
    return at;
  }

  void read_number() {
    const char kind = rest_.size() > 2 && rest_[0] == '0' ? static_cast<char>(std::tolower(rest_[1])) : '\0';
    if (kind == 'x' || kind == 'o' || kind == 'b') {
      const auto is_wanted = kind == 'x'
                                 ? +[](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }
                             : kind == 'o' ? +[](char c) { return c >= '0' && c <= '7'; }
                                           : +[](char c) { return c == '0' || c == '1'; };
      const size_t end = digits_end(2, is_wanted);
      if (end > 2) return add_number(TokenType::kInteger, end);
    }
    const size_t whole = digits_end(0, is_digit);
    size_t end = whole;
    const auto digit_at = [&](size_t at) { return at < rest_.size() && is_digit(rest_[at]); };
    const bool after_dot =
        !tokens_.empty() && tokens_.back().text == "." && tokens_.back().type == TokenType::kOperator;
    if (!after_dot && end < rest_.size() && rest_[end] == '.' && digit_at(end + 1))
      end = digits_end(end + 1, is_digit);
    if (!after_dot && end < rest_.size() && (rest_[end] == 'e' || rest_[end] == 'E')) {
      const size_t sign = end + 1 < rest_.size() && (rest_[end + 1] == '+' || rest_[end + 1] == '-') ? 1 : 0;
      if (digit_at(end + 1 + sign)) end = digits_end(end + 1 + sign, is_digit);
    }
    if (end > whole) return add_number(TokenType::kFloat, end);
    // A leading zero is a separate number: "007" is three numbers, which is a syntax error later.
    add_number(TokenType::kInteger, rest_[0] == '0' ? digits_end(0, [](char c) { return c == '0'; }) : whole);
  }

  void add_number(TokenType type, size_t size) {
    std::string digits(rest_.substr(0, size));
    std::erase(digits, '_');
    add(type, std::move(digits));
    skip(size);
  }

  void read_string() {
    const char quote = rest_[0];
    size_t end = 1;
    while (end < rest_.size() && rest_[end] != quote) end += rest_[end] == '\\' ? 2 : 1;
    if (end >= rest_.size()) fail_here("unexpected end of template in a string");
    add(TokenType::kString, unescaped(rest_.substr(1, end - 1)));
    skip(end + 1);
  }

  std::string unescaped(std::string_view text) const {
    std::string out;
    for (size_t at = 0; at < text.size();) {
      if (text[at] != '\\') {
        out += text[at++];
        continue;
      }
      const char c = text[at + 1];  // never past the end: a final backslash would have escaped the quote
      at += 2;
      static constexpr std::string_view kFrom = "\\'\"abfnrtv", kTo = "\\'\"\a\b\f\n\r\t\v";
      if (const size_t i = kFrom.find(c); i != std::string_view::npos) {
        out += kTo[i];
      } else if (c == 'x' || c == 'u' || c == 'U') {
        append_code_point(out, text, at, c == 'x' ? 2 : c == 'u' ? 4 : 8, 16);
      } else if (c >= '0' && c <= '7') {
        size_t size = 1;
        while (size < 3 && at - 1 + size < text.size() && text[at - 1 + size] >= '0' &&
               text[at - 1 + size] <= '7')
          ++size;
        append_code_point(out, text, --at, size, 8);
      } else if (c == 'N') {
        fail_here("\\N{...} in strings is not supported; write \\uXXXX");
      } else if (c != '\n') {
        out += '\\';
        out += c;
      }
    }
    return out;
  }

  void append_code_point(std::string& out, std::string_view text, size_t& at, size_t size, int base) const {
    uint32_t point = 0;
    for (const size_t end = at + size; at < end; ++at) {
      const auto c = static_cast<unsigned char>(at < text.size() ? text[at] : '?');
      if (!std::isxdigit(c)) fail_here("truncated \\x, \\u or \\U escape in a string");
      point = point * static_cast<uint32_t>(base) +
              static_cast<uint32_t>(is_digit(text[at]) ? c - '0' : (c | 32) - 'a' + 10);
    }
    if (point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) fail_here("invalid code point in a string");
    append_utf8(out, point);
  }

  const std::string source_;
  std::string_view rest_;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace fp4moe::jinja
