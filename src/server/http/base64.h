// Base64 (RFC 4648, with padding).
#pragma once

#include <string>
#include <string_view>

namespace fp4moe {

std::string to_base64(std::string_view bytes);

}  // namespace fp4moe
