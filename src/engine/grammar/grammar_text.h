// Prepares a grammar's text for compilation, and finds the part that an error about its size should name.
#pragma once

#include <string>

#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

// The text for the compiler: the given one, except that JSON schemas (also those inside a structural tag) are
// rewritten where xgrammar would not enforce them as they are (schema_check.h). kInvalidArgument: brackets
// nested deeper than 256 levels, text that is not valid JSON where it must be, or a schema that is malformed,
// matches nothing, or cannot be enforced; the message has the JSON path, the keyword and what to use instead.
Result<std::string> enforced_text(const GrammarSpec& spec);

// Describes the part that makes a compiled grammar large or slow and suggests a smaller alternative, as the
// end of an error message; empty if no part stands out. Printable, at most 200 bytes.
std::string costliest_part(const GrammarSpec& spec);

}  // namespace fp4moe
