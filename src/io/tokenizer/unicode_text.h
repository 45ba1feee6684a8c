// UTF-8 and the Unicode properties that tokenization depends on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fp4moe {

// Classification of the bytes at the start of a string.
enum class Utf8Kind {
  kCharacter,  // one whole character
  kInvalid,    // bytes that start no character
  kTruncated,  // the start of a character, cut off by the end of the string
};
struct Utf8Step {
  Utf8Kind kind;
  uint32_t num_bytes;  // of the character, or of the maximal subpart that one U+FFFD replaces
};
// Precondition: bytes is not empty.
Utf8Step utf8_step(std::string_view bytes);

bool is_valid_utf8(std::string_view bytes);
// Each maximal invalid subpart becomes one U+FFFD (Unicode 15, section 3.9, practice for U+FFFD).
void append_lossy_utf8(std::string_view bytes, std::string* text);

// The code point at the start of valid, non-empty UTF-8 of `num_bytes` bytes.
char32_t decode_utf8(std::string_view text, uint32_t num_bytes);
void append_utf8(char32_t code_point, std::string* text);

// Offset of the last character of valid, non-empty UTF-8.
size_t last_character(std::string_view text);

// Letters, marks, decimal and letter numbers, connectors and joiners: \w of Rust's regular expressions.
bool is_word_character(char32_t code_point);
// The White_Space property.
bool is_white_space(char32_t code_point);
// Number of bytes of leading or trailing white space in valid UTF-8.
size_t leading_white_space(std::string_view text);
size_t trailing_white_space(std::string_view text);

// Normalization Form C of valid UTF-8, with the Unicode 9 tables of the crate behind Hugging Face's NFC.
std::string normalize_nfc(std::string_view text);

// For a character that is new or changed since Unicode 14: a Unicode 14 character with the same general
// category, script and UTF-8 length. Other characters are returned unchanged.
char32_t older_character(char32_t code_point);
// Copies the text with each character newer than the regular expression library's tables (Unicode 14)
// replaced by its older_character, so that patterns see the properties of Unicode 16, as Hugging Face's do.
// Returns false, and does not change *out, if there is none.
bool replace_newer_characters(std::string_view text, std::string* out);

}  // namespace fp4moe
