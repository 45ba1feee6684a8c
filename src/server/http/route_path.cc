#include "server/http/route_path.h"

#include <charconv>

namespace fp4moe {

namespace {

std::string_view without_version(std::string_view path) {
  return path.starts_with("/v1/") ? path.substr(3) : path;
}

std::string_view without_last_slash(std::string_view path) {
  return path.size() > 1 && path.ends_with('/') ? path.substr(0, path.size() - 1) : path;
}

bool has_tail(std::string_view route) { return route.size() > 1 && route.ends_with('/'); }

std::string percent_decoded(std::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned char byte = 0;
    const char* const digits = text.data() + i + 1;
    const bool is_escape = text[i] == '%' && text.size() - i > 2 &&
                           std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2;
    decoded += is_escape ? static_cast<char>(byte) : text[i];
    if (is_escape) i += 2;
  }
  return decoded;
}

}  // namespace

bool is_route(std::string_view route, std::string_view path) {
  const std::string_view asked = without_version(without_last_slash(path));
  const std::string_view own = without_version(route);
  if (has_tail(route)) return asked.size() > own.size() && asked.starts_with(own);
  return asked == own;
}

std::string path_tail(std::string_view route, std::string_view path) {
  if (!is_route(route, path)) return "";
  return percent_decoded(without_version(without_last_slash(path)).substr(without_version(route).size()));
}

}  // namespace fp4moe
