#include <algorithm>
#include <array>
#include <optional>

#include "base/check.h"
#include "io/tokenizer/split_pattern.h"

namespace fp4moe {
namespace {

// The members of Oniguruma's \w, for use in a class. Besides letters, marks, decimal digits and connectors,
// \w contains the superscript digits and fractions of Latin-1.
constexpr std::string_view kWord = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";

// Scripts whose newer characters replace_newer_characters maps to characters of the same script.
constexpr std::array<std::string_view, 5> kScripts = {"Han", "Hiragana", "Katakana", "Hangul", "Latin"};

// The general categories: a letter, and the letters that may follow it. Every code point has exactly one.
constexpr std::array<std::string_view, 7> kCategories = {"Lultmo", "Mnce", "Ndlo",  "Pcdseifo",
                                                         "Smcko",  "Zslp", "Ccfson"};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// The general categories that `members`, a list of \p{...}, lacks, in the same form. Nothing if it lists
// anything else.
std::optional<std::string> other_categories(std::string_view members) {
  std::string listed;  // with a space behind each
  while (!members.empty()) {
    const size_t close = members.find('}');
    if (!members.starts_with("\\p{") || close == std::string_view::npos) return std::nullopt;
    listed += std::string(members.substr(3, close - 3)) + " ";
    members.remove_prefix(close + 1);
  }
  std::string others;
  size_t num_known = 0;  // listed names that are categories
  const auto is_listed = [&](const std::string& name) {
    const bool found = (" " + listed).find(" " + name + " ") != std::string::npos;
    num_known += found ? 1 : 0;
    return found;
  };
  for (const std::string_view group : kCategories) {
    if (is_listed(std::string(group.substr(0, 1)))) continue;
    std::string lacking;
    for (const char c : group.substr(1))
      if (const std::string name = {group[0], c}; !is_listed(name)) lacking += "\\p{" + name + "}";
    const bool lacks_all = lacking.size() == 6 * (group.size() - 1);
    others += lacks_all ? "\\p{" + std::string(group.substr(0, 1)) + "}" : lacking;
  }
  const auto num_listed = static_cast<size_t>(std::count(listed.begin(), listed.end(), ' '));
  return num_known == num_listed ? std::optional(others) : std::nullopt;
}

// Copies a pattern piece by piece, rewriting constructs that the two libraries interpret differently.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  Result<std::string> run() {
    while (!at_end()) FP4MOE_RETURN_IF_ERROR(in_class_ ? class_item() : item());
    if (in_class_) return refuse("a character class without its ]");
    return std::move(out_);
  }

 private:
  bool at_end() const { return next_ == pattern_.size(); }
  bool follows(std::string_view text) const { return pattern_.substr(next_, text.size()) == text; }
  void copy(size_t count) {
    out_ += pattern_.substr(next_, count);
    next_ += count;
  }
  bool accept(std::string_view text) {
    if (!follows(text)) return false;
    copy(text.size());
    return true;
  }
  Status refuse(const std::string& what) const {
    return unsupported("unsupported regular expression: " + what + " at byte " + std::to_string(next_) +
                       " of " + std::string(pattern_));
  }

  Status item() {
    switch (pattern_[next_]) {
      case '\\':
        return escape();
      case '(':
        return group();
      case ')':
        if (!caseless_.empty()) caseless_.pop_back();
        copy(1);
        return {};
      case '[':
        in_class_ = true;
        class_begin_ = next_;
        class_out_ = out_.size();
        copy(1);
        accept("^");
        if (follows("]")) return refuse("a character class that begins with ]");
        return {};
      case '^':
      case '$':
        return refuse("an anchor");
      case '{':
        return interval();
      default:
        return literal();
    }
  }

  Status literal() {
    // Ignoring case, Oniguruma can match one character with two ("ss" and a sharp s); PCRE2 cannot.
    if (is_caseless()) {
      const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
      const std::string pair = {lower(pattern_[next_]),
                                next_ + 1 < pattern_.size() ? lower(pattern_[next_ + 1]) : '\0'};
      for (std::string_view folded : {"ss", "ff", "fi", "fl", "st"})
        if (pair == folded) return refuse("the letters '" + pair + "' in a case-insensitive group");
      if (static_cast<uint8_t>(pattern_[next_]) >= 0x80)
        return refuse("a non-ASCII character in a case-insensitive group");
    }
    copy(1);
    return {};
  }

  bool is_caseless() const { return !caseless_.empty() && caseless_.back(); }

  Status group() {
    static constexpr std::array<std::string_view, 6> kKept = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    const bool was_caseless = is_caseless();
    for (std::string_view kept : kKept) {
      if (!accept(kept)) continue;
      caseless_.push_back(was_caseless);
      return {};
    }
    if (accept("(?i:")) {
      caseless_.push_back(true);
      return {};
    }
    if (follows("(?") || follows("(*")) return refuse("an unknown kind of group");
    copy(1);
    caseless_.push_back(was_caseless);
    return {};
  }

  // {n}, {n,} or {n,m}; a following + is possessive in PCRE2 but another repetition in Oniguruma.
  Status interval() {
    const size_t close = pattern_.find('}', next_);
    const std::string_view body =
        pattern_.substr(next_ + 1, close == std::string_view::npos ? 0 : close - next_ - 1);
    const size_t comma = body.find(',');
    const auto digits = [](std::string_view s) { return std::all_of(s.begin(), s.end(), is_digit); };
    const bool plain = !body.empty() && is_digit(body[0]) && digits(body.substr(0, comma)) &&
                       (comma == std::string_view::npos || digits(body.substr(comma + 1)));
    if (!plain) return refuse("a { that does not begin an interval {n}, {n,} or {n,m}");
    copy(close + 1 - next_);
    if (follows("+") || (follows("?") && comma == std::string_view::npos))
      return refuse("a + or ? after an interval");
    return {};
  }

  Status class_item() {
    if (follows("[")) return refuse("a character class inside a character class");
    if (follows("&&")) return intersection();
    if (follows("\\")) return escape();
    if (is_caseless() && static_cast<uint8_t>(pattern_[next_]) >= 0x80)
      return refuse("a non-ASCII character in a case-insensitive group");
    in_class_ = !follows("]");
    copy(1);
    return {};
  }

  // [A&&[^B]], where A lists general categories. PCRE2 has no intersections, but each character has one
  // category, so this class is [^CB], where C are the categories that A lacks.
  Status intersection() {
    static constexpr std::string_view kBegin = "&&[^";
    const auto others = other_categories(pattern_.substr(class_begin_ + 1, next_ - class_begin_ - 1));
    if (!others || !follows(kBegin) || is_caseless())
      return refuse("an intersection of character classes other than [\\p{CATEGORY}...&&[^...]]");
    out_.resize(class_out_);
    out_ += "[^" + *others;
    next_ += kBegin.size();
    if (follows("]")) return refuse("a character class that begins with ]");
    while (!at_end() && !follows("]")) FP4MOE_RETURN_IF_ERROR(class_item());
    if (!follows("]]")) return refuse("more than a class in an intersection");
    out_ += "]";
    next_ += 2;
    in_class_ = false;
    return {};
  }

  Status escape() {
    if (next_ + 1 == pattern_.size()) return refuse("a lone backslash");
    const char kind = pattern_[next_ + 1];
    if (!is_letter(kind) && !is_digit(kind)) {
      copy(2);
      return {};
    }
    if (kind == 'p' || kind == 'P') return property();
    if (kind == 'x' || kind == 'u') return code_point();
    const std::optional<std::string> replacement = simple_escape(kind);
    if (!replacement) return refuse(std::string("the escape \\") + kind);
    out_ += *replacement;
    next_ += 2;
    return {};
  }

  std::optional<std::string> simple_escape(char kind) const {
    const auto set = [&](std::string_view members) {
      return in_class_ ? std::string(members) : "[" + std::string(members) + "]";
    };
    switch (kind) {
      case 'n':
      case 'r':
      case 't':
      case 'f':
      case 'a':
      case 'e':
        return std::string{'\\', kind};
      case 'v':
        return "\\x{0b}";
      case 's':
        return "\\p{White_Space}";
      case 'S':
        return "\\P{White_Space}";
      case 'd':
        return "\\p{Nd}";
      case 'D':
        return "\\P{Nd}";
      case 'h':
        return set("0-9a-fA-F");
      case 'w':
        return set(kWord);
      case 'W':
        if (!in_class_) return "[^" + std::string(kWord) + "]";
        return std::nullopt;
      default:
        return std::nullopt;
    }
  }

  // \p{Name}, \P{Name} and \p{^Name} for general categories and some scripts.
  Status property() {
    const size_t close = pattern_.find('}', next_);
    if (pattern_.substr(next_ + 2, 1) != "{" || close == std::string_view::npos)
      return refuse("a property without its braces");
    std::string_view name = pattern_.substr(next_ + 3, close - next_ - 3);
    bool negated = pattern_[next_ + 1] == 'P';
    if (!name.empty() && name[0] == '^') {
      negated = !negated;
      name.remove_prefix(1);
    }
    const bool is_category =
        (name.size() == 1 || name.size() == 2) && std::all_of(name.begin(), name.end(), is_letter);
    const bool is_script = std::find(kScripts.begin(), kScripts.end(), name) != kScripts.end();
    if (!is_category && !is_script) return refuse("the property " + std::string(name));
    if (is_caseless() && (name == "Lu" || name == "Ll" || name == "Lt"))
      return refuse("the property " + std::string(name) + " in a case-insensitive group");
    out_ += negated ? "\\P{" : "\\p{";
    out_ += (is_script ? "sc:" : "") + std::string(name) + "}";
    next_ = close + 1;
    return {};
  }

  // \xHH, \x{H...} and \uHHHH.
  Status code_point() {
    const bool braces = pattern_.substr(next_ + 1, 2) == "x{";
    const size_t begin = next_ + (braces ? 3 : 2);
    const size_t max_digits = braces ? 8 : pattern_[next_ + 1] == 'x' ? 2 : 4;
    size_t end = begin;
    while (end < pattern_.size() && end - begin < max_digits && is_hex(pattern_[end])) ++end;
    const bool closed = !braces || pattern_.substr(end, 1) == "}";
    if (end == begin || !closed || (!braces && end - begin != max_digits))
      return refuse("a malformed code point");
    out_ += "\\x{" + std::string(pattern_.substr(begin, end - begin)) + "}";
    next_ = end + (braces ? 1 : 0);
    return {};
  }

  std::string_view pattern_;
  size_t next_ = 0;
  bool in_class_ = false;
  size_t class_begin_ = 0, class_out_ = 0;  // where the class begins in pattern_ and in out_
  std::vector<bool> caseless_;              // per open group
  std::string out_;
};

}  // namespace

Result<std::string> translate_pattern(std::string_view pattern) { return Translator(pattern).run(); }

std::string escape_pattern(std::string_view text) {
  std::string escaped;
  for (char c : text) {
    const bool plain = is_letter(c) || is_digit(c) || static_cast<uint8_t>(c) >= 0x80;
    if (!plain) escaped += '\\';
    escaped += c;
  }
  return escaped;
}

}  // namespace fp4moe
