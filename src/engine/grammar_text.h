// What can be said of a grammar from its text alone: bounds of a JSON schema that contradict, and the part
// that an error about its size should name.
#pragma once

#include <string>

#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

// kInvalidArgument, naming the place, the keyword, its value and what is legal: brackets nested deeper than
// 256; in a JSON schema (or one inside of a structural tag) a count that is negative or no integer, a minimum
// above its maximum, a $ref that only leads back to itself. Text that is not JSON passes: the compiler
// explains it.
Status check_grammar_text(const GrammarSpec& spec);

// The part that makes a compiled grammar large or slow, with what would be smaller, as the end of a message;
// empty if no part stands out. Printable, at most 200 bytes.
std::string costliest_part(const GrammarSpec& spec);

}  // namespace fp4moe
