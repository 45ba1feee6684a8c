// Quotes bytes from peers in messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fp4moe {

// Shows at most `max_bytes` bytes that a peer sent, as one line for a log or an error: printable ASCII
// unchanged, everything else and the backslash escaped as in C ("\n", "\x1b"); "..." marks a cut.
std::string excerpt(std::string_view text, size_t max_bytes = 80);

}  // namespace fp4moe
