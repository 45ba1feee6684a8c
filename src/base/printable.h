// Text from peers, clients or files, made safe for one log line or error message.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fp4moe {

// Printable ASCII is kept; every other byte (control characters, ANSI escapes, newlines, UTF-8) becomes \xNN.
// At most max_bytes of the text are shown; a longer one ends in "... (N bytes)".
std::string printable(std::string_view text, size_t max_bytes = 200);

}  // namespace fp4moe
