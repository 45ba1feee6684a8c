// Text of peers in messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fp4moe {

// Bytes that a peer sent, for a log line or an error: printable ASCII as it is, all else and the backslash
// escaped as in C ("\n", "\x1b"), so that it is one line and moves no terminal's cursor. At most `max_bytes`
// bytes of the text are shown; "..." stands for the rest.
std::string excerpt(std::string_view text, size_t max_bytes = 80);

}  // namespace fp4moe
