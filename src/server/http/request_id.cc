#include "server/http/request_id.h"

#include <algorithm>

namespace fp4moe {

bool is_request_id(std::string_view text) {
  constexpr size_t kMaxBytes = 256;
  return !text.empty() && text.size() <= kMaxBytes &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < '\x7f'; });
}

std::string request_id_header(const std::string& id) {
  return is_request_id(id) ? "x-request-id: " + id + "\r\n" : "";
}

}  // namespace fp4moe
