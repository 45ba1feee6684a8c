// ExpressionParser: the expression half of Jinja's grammar, and the token cursor shared with the statement
// parser.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "io/jinja/ast.h"
#include "io/jinja/lexer.h"

namespace fp4moe::jinja {

// Recursive descent. Large because each level of precedence and each kind of literal is a method.
class ExpressionParser {
 protected:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  struct TupleRule {
    bool targets = false;            // only assignment targets, such as names
    bool conditionals = true;        // "a if b else c" is allowed without parentheses
    bool parenthesised = false;      // in parentheses: an empty tuple is allowed
    std::string_view end_name = {};  // a name that ends the tuple
  };
  ExprPtr parse_expression(bool conditionals = true);
  ExprPtr parse_tuple(TupleRule rule);
  ExprPtr parse_target(std::string_view end_name = {}, bool tuples = true);
  ExprPtr parse_primary();
  ExprPtr parse_postfix(ExprPtr node);
  // Parses `| a | b(c)`, applied to `node`; with is_first, no bar precedes the first filter.
  ExprPtr parse_filters(ExprPtr node, bool is_first);
  std::vector<Argument> parse_call_arguments();

  const Token& token() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  const Token& advance() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is_op(std::string_view op) const { return token().type == TokenType::kOperator && token().text == op; }
  bool is_name(std::string_view name) const {
    return token().type == TokenType::kName && token().text == name;
  }
  bool is_any_name(std::initializer_list<std::string_view> names) const;
  bool accept_op(std::string_view op);
  bool accept_name(std::string_view name);
  void expect_op(std::string_view op);
  void expect_name(std::string_view name);
  void expect(TokenType type);
  std::string expect_any_name();
  [[noreturn]] void fail_at(int line, const std::string& message) const;
  [[noreturn]] void fail_unexpected(const std::string& expected) const;
  ExprPtr make(ExprKind kind, int line, std::string text, std::vector<ExprPtr> args);

  // RAII nesting level; refuses levels beyond kMaxNesting.
  struct Nesting {
    explicit Nesting(ExpressionParser& p);
    ~Nesting() { --parser.nesting_; }
    ExpressionParser& parser;
  };

  int conditional_ = 0;              // > 0: unknown filters and tests are errors only if evaluated
  std::vector<Macro*> open_macros_;  // the macros being parsed

 private:
  ExprPtr parse_condition();
  ExprPtr parse_or();
  ExprPtr parse_and();
  ExprPtr parse_not();
  ExprPtr parse_compare();
  ExprPtr parse_sum();
  ExprPtr parse_concat();
  ExprPtr parse_product();
  ExprPtr parse_power();
  ExprPtr parse_unary(bool filters);
  ExprPtr parse_literal();
  ExprPtr parse_list();
  ExprPtr parse_dict();
  ExprPtr parse_subscript(ExprPtr node);
  ExprPtr parse_subscript_part(ExprPtr node);
  ExprPtr parse_filter_chain(ExprPtr node);
  ExprPtr parse_test(ExprPtr node);
  std::string parse_dotted_name();
  ExprPtr parse_left_assoc(std::initializer_list<std::string_view> ops,
                           ExprPtr (ExpressionParser::*operand)());
  void note_name(const std::string& name);

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
};

}  // namespace fp4moe::jinja
