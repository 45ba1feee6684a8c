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
// Appends `bytes`; each maximal invalid subpart becomes one U+FFFD (Unicode 15, section 3.9).
void append_lossy_utf8(std::string_view bytes, std::string* text);

// Returns the first code point, encoded in `num_bytes` bytes, of valid, non-empty UTF-8.
char32_t decode_utf8(std::string_view text, uint32_t num_bytes);
void append_utf8(char32_t code_point, std::string* text);

// Returns the offset of the last character of valid, non-empty UTF-8.
size_t last_character(std::string_view text);

// Whether \w in Rust's regular expressions matches: a letter, mark, decimal or letter number, connector or
// joiner.
bool is_word_character(char32_t code_point);
// Whether the code point has the White_Space property.
bool is_white_space(char32_t code_point);
// Return the number of bytes of leading or trailing white space in valid UTF-8.
size_t leading_white_space(std::string_view text);
size_t trailing_white_space(std::string_view text);

// Returns valid UTF-8 in Normalization Form C, with the Unicode 9 tables of the crate that Hugging Face uses.
std::string normalize_nfc(std::string_view text);

// Returns, for a character that is new or has changed since Unicode 14, a Unicode 14 character with the same
// general category, script and UTF-8 length. Returns other characters unchanged.
char32_t older_character(char32_t code_point);
// Copies the text with each character newer than the regular expression library's tables (Unicode 14)
// replaced by its older_character, so that patterns see the properties of Unicode 16, as Hugging Face's do.
// Returns false, and does not change *out, if there is no such character.
bool replace_newer_characters(std::string_view text, std::string* out);

}  // namespace fp4moe
