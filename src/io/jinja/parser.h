// Parser: converts tokens to the syntax tree.
#pragma once

#include <string_view>

#include "io/jinja/ast.h"

namespace fp4moe::jinja {

inline constexpr size_t kMaxSourceBytes = size_t{4} << 20;
inline constexpr int kMaxNesting = 200;  // separate limits for expressions and for statements

// Throws Error{kSyntax} or, for a template that is too large or too deep, Error{kLimit}, with the line.
Body parse_template(std::string_view source);

}  // namespace fp4moe::jinja
