#include "server/http/excerpt.h"

namespace fp4moe {

std::string excerpt(std::string_view text, size_t max_bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string shown;
  for (const char c : text.substr(0, max_bytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n' || c == '\r' || c == '\t' || c == '\\') {
      shown += '\\';
      shown += c == '\n' ? 'n' : c == '\r' ? 'r' : c == '\t' ? 't' : '\\';
    } else if (byte >= 0x20 && byte < 0x7f) {
      shown += c;
    } else {
      shown += "\\x";
      shown += kDigits[byte >> 4];
      shown += kDigits[byte & 15];
    }
  }
  return text.size() > max_bytes ? shown + "..." : shown;
}

}  // namespace fp4moe
