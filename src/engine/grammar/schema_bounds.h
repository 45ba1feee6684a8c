// Counts, numeric bounds and patterns of a JSON schema.
#pragma once

#include <string>

#include "engine/grammar/json_schema.h"

namespace fp4moe {

// kInvalidArgument for a count that is not an integer from 0 to 2^31 - 1, a bound that is not a number, a
// minimum above its maximum, and numbers that xgrammar would not enforce exactly.
Status check_bounds(const SchemaJson& schema, const std::string& path);

// kInvalidArgument for a pattern that xgrammar would change: assertions other than ^ at the start and $ at
// the end, back-references, Unicode classes, and characters that JSON text has to escape. `place` is the path
// of the pattern.
Status check_pattern(const std::string& pattern, const std::string& place);

// The same for a pattern of the whole output, which may have any character.
Status check_regex(const std::string& pattern);

// The pattern with \u{...} instead of each pair of escaped surrogates \uXXXX\uXXXX, as in JavaScript.
std::string join_surrogates(const std::string& pattern);

// join_surrogates() with \u{...} also for each character outside ASCII: xgrammar excludes quotes and control
// characters only from ASCII patterns.
std::string ascii_pattern(const std::string& pattern);

}  // namespace fp4moe
