#include "io/tokenizer/unicode_text.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <vector>

namespace fp4moe {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

uint8_t byte_at(std::string_view text, size_t index) { return static_cast<uint8_t>(text[index]); }

// Code points that got a combining class or composition after Unicode 9: in the Unicode 9 tables, they are
// starters that neither reorder nor compose.
struct CodePointRange {
  char32_t first, last;
};
constexpr CodePointRange kNewerMarks[] = {
    {0x07FD, 0x07FD},   {0x0898, 0x089F},   {0x08CA, 0x08D3},   {0x09FE, 0x09FE},   {0x0C3C, 0x0C3C},
    {0x0D3B, 0x0D3B},   {0x0D3C, 0x0D3C},   {0x0EBA, 0x0EBA},   {0x1715, 0x1715},   {0x1ABF, 0x1ACE},
    {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF},
    {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E},
    {0x11839, 0x1183A}, {0x11930, 0x11930}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0},
    {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45},
    {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136},
    {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF},
};

bool is_newer_mark(char32_t code_point) {
  const auto range = std::lower_bound(std::begin(kNewerMarks), std::end(kNewerMarks), code_point,
                                      [](const CodePointRange& r, char32_t c) { return r.last < c; });
  return range != std::end(kNewerMarks) && range->first <= code_point;
}

int combining_class(int32_t code_point) { return utf8proc_get_property(code_point)->combining_class; }

// Orders and composes the decomposed characters of `run`, appends them to `text` and clears `run`. utf8proc's
// own reordering takes quadratic time on long runs of marks; this one does not.
void flush_composed(std::vector<int32_t>* run, std::string* text) {
  for (auto begin = run->begin(); begin != run->end();) {
    if (combining_class(*begin) == 0) {
      ++begin;
      continue;
    }
    const auto end = std::find_if(begin, run->end(), [](int32_t c) { return combining_class(c) == 0; });
    std::stable_sort(begin, end,
                     [](int32_t a, int32_t b) { return combining_class(a) < combining_class(b); });
    begin = end;
  }
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  const auto length =
      utf8proc_normalize_utf32(run->data(), static_cast<utf8proc_ssize_t>(run->size()), options);
  for (utf8proc_ssize_t i = 0; i < length; ++i) append_utf8(static_cast<char32_t>((*run)[i]), text);
  run->clear();
}

}  // namespace

Utf8Step utf8_step(std::string_view bytes) {
  const uint8_t lead = byte_at(bytes, 0);
  if (lead < 0x80) return {Utf8Kind::kCharacter, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Kind::kInvalid, 1};
  const uint32_t num_bytes = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and code points over U+10FFFF.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (uint32_t i = 1; i < num_bytes; ++i) {
    if (i == bytes.size()) return {Utf8Kind::kTruncated, i};
    if (byte_at(bytes, i) < low || byte_at(bytes, i) > high) return {Utf8Kind::kInvalid, i};
    low = 0x80, high = 0xBF;
  }
  return {Utf8Kind::kCharacter, num_bytes};
}

bool is_valid_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    if (step.kind != Utf8Kind::kCharacter) return false;
    bytes.remove_prefix(step.num_bytes);
  }
  return true;
}

void append_lossy_utf8(std::string_view bytes, std::string* text) {
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    text->append(step.kind == Utf8Kind::kCharacter ? bytes.substr(0, step.num_bytes) : kReplacement);
    bytes.remove_prefix(step.num_bytes);
  }
}

char32_t decode_utf8(std::string_view text, uint32_t num_bytes) {
  const uint8_t lead = byte_at(text, 0);
  if (num_bytes == 1) return lead;
  char32_t code_point = lead & (0x7F >> num_bytes);
  for (uint32_t i = 1; i < num_bytes; ++i) code_point = code_point << 6 | (byte_at(text, i) & 0x3F);
  return code_point;
}

void append_utf8(char32_t code_point, std::string* text) {
  uint8_t bytes[4];
  const auto num_bytes = utf8proc_encode_char(static_cast<int32_t>(code_point), bytes);
  text->append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(num_bytes));
}

size_t last_character(std::string_view text) {
  size_t begin = text.size() - 1;
  while ((byte_at(text, begin) & 0xC0) == 0x80) --begin;
  return begin;
}

bool is_word_character(char32_t c) {
  switch (utf8proc_category(static_cast<int32_t>(older_character(c)))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      break;
  }
  // Joiners, and the circled and squared letters, which are symbols with the Alphabetic property.
  return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
         (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

size_t leading_white_space(std::string_view text) {
  size_t end = 0;
  while (end < text.size()) {
    const std::string_view rest = text.substr(end);
    const uint32_t num_bytes = utf8_step(rest).num_bytes;
    if (!is_white_space(decode_utf8(rest, num_bytes))) break;
    end += num_bytes;
  }
  return end;
}

size_t trailing_white_space(std::string_view text) {
  size_t begin = text.size();
  while (begin > 0) {
    const size_t previous = last_character(text.substr(0, begin));
    if (!is_white_space(decode_utf8(text.substr(previous), static_cast<uint32_t>(begin - previous)))) break;
    begin = previous;
  }
  return text.size() - begin;
}

std::string normalize_nfc(std::string_view text) {
  // All characters below U+0300, whose first byte is below 0xCC, are starters in Form C.
  const auto plain = [](char c) { return static_cast<uint8_t>(c) < 0xCC; };
  if (std::all_of(text.begin(), text.end(), plain)) return std::string(text);
  std::string normal;
  normal.reserve(text.size());
  std::vector<int32_t> run;  // decomposed characters
  while (!text.empty()) {
    const uint32_t num_bytes = utf8_step(text).num_bytes;
    const char32_t code_point = decode_utf8(text, num_bytes);
    if (is_newer_mark(code_point)) {
      flush_composed(&run, &normal);
      normal.append(text.substr(0, num_bytes));
    } else {
      int32_t parts[8];  // a canonical decomposition has at most four
      int boundary = 0;
      const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
      const auto count =
          utf8proc_decompose_char(static_cast<int32_t>(code_point), parts, 8, options, &boundary);
      run.insert(run.end(), parts, parts + count);
    }
    text.remove_prefix(num_bytes);
  }
  flush_composed(&run, &normal);
  return normal;
}

}  // namespace fp4moe
