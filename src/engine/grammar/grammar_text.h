// Inspects a grammar's text before compilation: finds contradictory bounds in JSON schemas, and the part that
// an error about the grammar's size should name.
#pragma once

#include <string>

#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Returns kInvalidArgument, naming the place, the keyword, its value and the allowed values, for brackets
// nested deeper than 256 levels and, in a JSON schema (also one inside a structural tag), for a count that is
// negative or not an integer, a bound that is not a number, a minimum above its maximum, a multipleOf that is
// not above 0, or a $ref that only leads back to itself. Text that is not valid JSON passes: the compiler
// reports it.
Status check_grammar_text(const GrammarSpec& spec);

// Describes the part that makes a compiled grammar large or slow and suggests a smaller alternative, as the
// end of an error message; empty if no part stands out. Printable, at most 200 bytes.
std::string costliest_part(const GrammarSpec& spec);

}  // namespace fp4moe
