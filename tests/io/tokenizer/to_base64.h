// Encodes with the standard alphabet, bit by bit.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fp4moe {

inline std::string to_base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const auto bit = [&](size_t i) {
    return i / 8 < bytes.size() ? static_cast<uint8_t>(bytes[i / 8]) >> (7 - i % 8) & 1 : 0;
  };
  std::string text;
  for (size_t begin = 0; begin < 8 * bytes.size(); begin += 6) {
    int digit = 0;
    for (size_t i = begin; i < begin + 6; ++i) digit = 2 * digit + bit(i);
    text += kDigits[digit];
  }
  while (text.size() % 4 != 0) text += '=';
  return text;
}

}  // namespace fp4moe
