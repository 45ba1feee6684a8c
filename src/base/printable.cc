#include "base/printable.h"

namespace fp4moe {

std::string printable(std::string_view text, size_t max_bytes) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string line;
  for (const char c : text.substr(0, max_bytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      line += c;
    } else {
      line += "\\x";
      line += kHex[byte >> 4];
      line += kHex[byte & 15];
    }
  }
  if (text.size() > max_bytes) line += "... (" + std::to_string(text.size()) + " bytes)";
  return line;
}

}  // namespace fp4moe
