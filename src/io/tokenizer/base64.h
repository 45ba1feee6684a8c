// Base64 with the standard alphabet and padding (RFC 4648, section 4).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fp4moe {

// Returns nothing if no bytes have exactly this encoding.
std::optional<std::string> from_base64(std::string_view text);

}  // namespace fp4moe
