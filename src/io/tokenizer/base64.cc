#include "io/tokenizer/base64.h"

#include <cstdint>

namespace fp4moe {
namespace {

int32_t value_of_digit(char digit) {
  if (digit >= 'A' && digit <= 'Z') return digit - 'A';
  if (digit >= 'a' && digit <= 'z') return digit - 'a' + 26;
  if (digit >= '0' && digit <= '9') return digit - '0' + 52;
  return digit == '+' ? 62 : digit == '/' ? 63 : -1;
}

}  // namespace

std::optional<std::string> from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  size_t num_digits = text.size();
  while (num_digits > 0 && text.size() - num_digits < 2 && text[num_digits - 1] == '=') --num_digits;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  for (size_t i = 0; i < num_digits; ++i) {
    const int32_t value = value_of_digit(text[i]);
    if (value < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    // Every digit but the first of four completes a byte, and leaves 4, 2 and 0 bits.
    if (i % 4 != 0) bytes += static_cast<char>(bits >> (6 - 2 * (i % 4)) & 0xFF);
  }
  const uint32_t num_left = num_digits % 4 == 0 ? 0 : 8 - 2 * (num_digits % 4);
  if ((bits & ((1u << num_left) - 1)) != 0) return std::nullopt;
  return bytes;
}

}  // namespace fp4moe
