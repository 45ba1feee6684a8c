// Lexer: converts template text to tokens, with Jinja's white space rules for trim_blocks and lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fp4moe::jinja {

enum class TokenType {
  kData,
  kPrintBegin,
  kPrintEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kInteger,
  kFloat,
  kString,
  kOperator,
  kEnd
};

struct Token {
  TokenType type;
  std::string text;  // data; a name, operator or number as written; a string's value
  int line;          // 1-based
};

// Returns the tokens, of which the last is kEnd. Throws Error{kSyntax} with the line.
std::vector<Token> tokenize(std::string_view source);

}  // namespace fp4moe::jinja
