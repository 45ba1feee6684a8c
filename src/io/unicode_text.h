// UTF-8 and the Unicode properties that tokenization depends on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fp4moe {

// What the bytes at the start of a string are.
enum class Utf8Kind {
  kCharacter,  // one whole character
  kInvalid,    // bytes that no character starts with
  kTruncated,  // the start of a character, cut off by the end of the string
};
struct Utf8Step {
  Utf8Kind kind;
  uint32_t num_bytes;  // of the character, or of the maximal subpart that one U+FFFD stands for
};
// Precondition: bytes is not empty.
Utf8Step utf8_step(std::string_view bytes);

bool is_valid_utf8(std::string_view bytes);
// Each maximal subpart that is no character becomes U+FFFD (Unicode 15, section 3.9, practice for U+FFFD).
void append_lossy_utf8(std::string_view bytes, std::string* text);

// The code point at the start of valid, non-empty UTF-8 of `num_bytes` bytes.
char32_t decode_utf8(std::string_view text, uint32_t num_bytes);
void append_utf8(char32_t code_point, std::string* text);

// Where the last character of valid, non-empty UTF-8 begins.
size_t last_character(std::string_view text);

// Letters, marks, decimal and letter numbers, connectors and joiners: \w of Rust's regular expressions.
bool is_word_character(char32_t code_point);
// The property White_Space.
bool is_white_space(char32_t code_point);
// Bytes of the white space that valid UTF-8 starts or ends with.
size_t leading_white_space(std::string_view text);
size_t trailing_white_space(std::string_view text);

// Normalization Form C of valid UTF-8, with the tables (Unicode 9) of the crate behind Hugging Face's NFC.
std::string normalize_nfc(std::string_view text);

// A character of equal general category, script and length in UTF-8 that Unicode 14 has, for one of Unicode
// 16 that is newer or was changed; others stay as they are.
char32_t older_character(char32_t code_point);
// The text with each character that is newer than the regular expression library's tables (Unicode 14)
// replaced by its older_character, so that patterns see the properties of Unicode 16, as Hugging Face's do.
// Returns false, and leaves *out alone, if there is none.
bool replace_newer_characters(std::string_view text, std::string* out);

}  // namespace fp4moe
