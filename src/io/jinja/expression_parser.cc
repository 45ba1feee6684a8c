#include "io/jinja/expression_parser.h"

#include <algorithm>
#include <charconv>

#include "io/jinja/builtins.h"
#include "io/jinja/error.h"
#include "io/jinja/parser.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

std::vector<ExprPtr> list_of(ExprPtr a) {
  std::vector<ExprPtr> args;
  args.push_back(std::move(a));
  return args;
}

std::vector<ExprPtr> list_of(ExprPtr a, ExprPtr b) {
  std::vector<ExprPtr> args = list_of(std::move(a));
  args.push_back(std::move(b));
  return args;
}

std::string shown(const Token& token) {
  switch (token.type) {
    case TokenType::kEnd:
      return "end of template";
    case TokenType::kBlockBegin:
      return "'{%'";
    case TokenType::kBlockEnd:
      return "'%}'";
    case TokenType::kPrintBegin:
      return "'{{'";
    case TokenType::kPrintEnd:
      return "'}}'";
    case TokenType::kData:
      return "template text";
    case TokenType::kString:
      return "string " + jinja::quoted(token.text);
    default:
      return "'" + token.text + "'";
  }
}

}  // namespace

ExpressionParser::Nesting::Nesting(ExpressionParser& p) : parser(p) {
  if (++p.nesting_ > kMaxNesting)
    throw Error{ErrorKind::kLimit, "nested more than " + std::to_string(kMaxNesting) + " levels deep",
                p.token().line};
}

void ExpressionParser::fail_at(int line, const std::string& message) const {
  throw Error{ErrorKind::kSyntax, message, line};
}

void ExpressionParser::fail_unexpected(const std::string& expected) const {
  fail_at(token().line, "expected " + expected + ", got " + shown(token()));
}

ExprPtr ExpressionParser::make(ExprKind kind, int line, std::string text, std::vector<ExprPtr> args) {
  auto node = std::make_unique<Expr>(Expr{kind, line, 1, std::move(text), {}, {}, std::move(args), {}});
  for (const ExprPtr& arg : node->args)
    if (arg != nullptr) node->height = std::max(node->height, arg->height + 1);
  if (node->height > kMaxNesting)
    throw Error{ErrorKind::kLimit,
                "an expression is more than " + std::to_string(kMaxNesting) + " operations deep", line};
  return node;
}

bool ExpressionParser::is_any_name(std::initializer_list<std::string_view> names) const {
  return std::any_of(names.begin(), names.end(), [&](std::string_view name) { return is_name(name); });
}

bool ExpressionParser::accept_op(std::string_view op) {
  if (!is_op(op)) return false;
  advance();
  return true;
}

bool ExpressionParser::accept_name(std::string_view name) {
  if (!is_name(name)) return false;
  advance();
  return true;
}

void ExpressionParser::expect_op(std::string_view op) {
  if (!accept_op(op)) fail_unexpected("'" + std::string(op) + "'");
}

void ExpressionParser::expect_name(std::string_view name) {
  if (!accept_name(name)) fail_unexpected("'" + std::string(name) + "'");
}

void ExpressionParser::expect(TokenType type) {
  if (token().type != type) fail_unexpected(shown({type, "", 0}));
  advance();
}

std::string ExpressionParser::expect_any_name() {
  if (token().type != TokenType::kName) fail_unexpected("a name");
  return advance().text;
}

ExprPtr ExpressionParser::parse_expression(bool conditionals) {
  const Nesting nesting(*this);
  return conditionals ? parse_condition() : parse_or();
}

ExprPtr ExpressionParser::parse_condition() {
  int line = token().line;
  ExprPtr node = parse_or();
  while (accept_name("if")) {
    ++conditional_;
    std::vector<ExprPtr> args = list_of(parse_or(), std::move(node));
    if (accept_name("else")) args.push_back(parse_expression());
    --conditional_;
    node = make(ExprKind::kCond, line, "", std::move(args));
    line = token().line;
  }
  return node;
}

ExprPtr ExpressionParser::parse_or() {
  ExprPtr node = parse_and();
  while (is_name("or")) {
    const int line = advance().line;
    node = make(ExprKind::kOr, line, "", list_of(std::move(node), parse_and()));
  }
  return node;
}

ExprPtr ExpressionParser::parse_and() {
  ExprPtr node = parse_not();
  while (is_name("and")) {
    const int line = advance().line;
    node = make(ExprKind::kAnd, line, "", list_of(std::move(node), parse_not()));
  }
  return node;
}

ExprPtr ExpressionParser::parse_not() {
  if (!is_name("not")) return parse_compare();
  const Nesting nesting(*this);
  const int line = advance().line;
  return make(ExprKind::kNot, line, "", list_of(parse_not()));
}

ExprPtr ExpressionParser::parse_compare() {
  const int line = token().line;
  std::vector<ExprPtr> args = list_of(parse_sum());
  std::vector<std::string> ops;
  for (;;) {
    static constexpr std::string_view kOps[] = {"==", "!=", "<", "<=", ">", ">="};
    const bool symbol = token().type == TokenType::kOperator &&
                        std::find(std::begin(kOps), std::end(kOps), token().text) != std::end(kOps);
    if (symbol || is_name("in")) {
      ops.push_back(advance().text);
    } else if (is_name("not") && look().type == TokenType::kName && look().text == "in") {
      advance();
      advance();
      ops.push_back("not in");
    } else {
      break;
    }
    args.push_back(parse_sum());
  }
  if (ops.empty()) return std::move(args[0]);
  ExprPtr node = make(ExprKind::kCompare, line, "", std::move(args));
  node->ops = std::move(ops);
  return node;
}

ExprPtr ExpressionParser::parse_left_assoc(std::initializer_list<std::string_view> ops,
                                           ExprPtr (ExpressionParser::*operand)()) {
  ExprPtr node = (this->*operand)();
  while (std::any_of(ops.begin(), ops.end(), [&](std::string_view op) { return is_op(op); })) {
    const Token& op = advance();
    const int line = op.line;
    std::string symbol = op.text;
    node = make(ExprKind::kBinary, line, "", list_of(std::move(node), (this->*operand)()));
    node->ops.push_back(std::move(symbol));
  }
  return node;
}

ExprPtr ExpressionParser::parse_sum() {
  return parse_left_assoc({"+", "-"}, &ExpressionParser::parse_concat);
}
ExprPtr ExpressionParser::parse_product() {
  return parse_left_assoc({"*", "/", "//", "%"}, &ExpressionParser::parse_power);
}

ExprPtr ExpressionParser::parse_concat() {
  const int line = token().line;
  std::vector<ExprPtr> args = list_of(parse_product());
  while (accept_op("~")) args.push_back(parse_product());
  if (args.size() == 1) return std::move(args[0]);
  return make(ExprKind::kConcat, line, "", std::move(args));
}

ExprPtr ExpressionParser::parse_power() {
  ExprPtr node = parse_unary(true);
  while (is_op("**")) {
    const int line = advance().line;
    node = make(ExprKind::kBinary, line, "", list_of(std::move(node), parse_unary(true)));
    node->ops.push_back("**");
  }
  return node;
}

ExprPtr ExpressionParser::parse_unary(bool filters) {
  const Nesting nesting(*this);
  ExprPtr node;
  if (is_op("-") || is_op("+")) {
    const ExprKind kind = is_op("-") ? ExprKind::kNeg : ExprKind::kPos;
    const int line = advance().line;
    node = make(kind, line, "", list_of(parse_unary(false)));
  } else {
    node = parse_primary();
  }
  node = parse_postfix(std::move(node));
  return filters ? parse_filter_chain(std::move(node)) : std::move(node);
}

ExprPtr ExpressionParser::parse_primary() {
  const int line = token().line;
  if (token().type == TokenType::kName) {
    const std::string name = advance().text;
    if (name == "true" || name == "True" || name == "false" || name == "False" || name == "none" ||
        name == "None") {
      ExprPtr node = make(ExprKind::kConst, line, "", {});
      node->value =
          name[0] == 'n' || name[0] == 'N' ? Value(None{}) : Value(name[0] == 't' || name[0] == 'T');
      return node;
    }
    note_name(name);
    return make(ExprKind::kName, line, name, {});
  }
  if (accept_op("(")) {
    ExprPtr node = parse_tuple({.parenthesised = true});
    expect_op(")");
    return node;
  }
  if (is_op("[")) return parse_list();
  if (is_op("{")) return parse_dict();
  return parse_literal();
}

// Records the use of names that make a macro accept surplus arguments.
void ExpressionParser::note_name(const std::string& name) {
  for (Macro* macro : open_macros_) {
    if (name == "varargs") macro->uses_varargs = true;
    if (name == "kwargs") macro->uses_kwargs = true;
    if (name == "caller") macro->uses_caller = true;
  }
}

ExprPtr ExpressionParser::parse_literal() {
  const Token& first = token();
  ExprPtr node = make(ExprKind::kConst, first.line, "", {});
  if (first.type == TokenType::kString) {
    while (token().type == TokenType::kString) node->text += advance().text;
    node->value = text_value(node->text);
    return node;
  }
  const std::string& digits = first.text;
  if (first.type == TokenType::kInteger) {
    static constexpr std::string_view kPrefixes = "xXoObB";
    const size_t prefix = digits.size() > 2 ? kPrefixes.find(digits[1]) : std::string_view::npos;
    const int base = prefix == std::string_view::npos ? 10 : prefix < 2 ? 16 : prefix < 4 ? 8 : 2;
    int64_t value = 0;
    const char* begin = digits.data() + (base == 10 ? 0 : 2);
    if (std::from_chars(begin, digits.data() + digits.size(), value, base).ec != std::errc())
      fail_at(first.line, "integer " + digits + " does not fit in 64 bits");
    node->value = Value(value);
  } else if (first.type == TokenType::kFloat) {
    double value = 0;
    if (std::from_chars(digits.data(), digits.data() + digits.size(), value).ec != std::errc())
      fail_at(first.line, "number " + digits + " is out of range");
    node->value = Value(value);
  } else {
    fail_unexpected("an expression");
  }
  advance();
  return node;
}

ExprPtr ExpressionParser::parse_list() {
  const int line = advance().line;
  std::vector<ExprPtr> args;
  while (!is_op("]")) {
    if (!args.empty()) expect_op(",");
    if (is_op("]")) break;
    args.push_back(parse_expression());
  }
  expect_op("]");
  return make(ExprKind::kList, line, "", std::move(args));
}

ExprPtr ExpressionParser::parse_dict() {
  const int line = advance().line;
  std::vector<ExprPtr> args;
  while (!is_op("}")) {
    if (!args.empty()) expect_op(",");
    if (is_op("}")) break;
    args.push_back(parse_expression());
    expect_op(":");
    args.push_back(parse_expression());
  }
  expect_op("}");
  return make(ExprKind::kDict, line, "", std::move(args));
}

ExprPtr ExpressionParser::parse_tuple(TupleRule rule) {
  const int line = token().line;
  std::vector<ExprPtr> args;
  bool is_tuple = false;
  const auto ended = [&] {
    return token().type == TokenType::kBlockEnd || token().type == TokenType::kPrintEnd || is_op(")") ||
           (!rule.end_name.empty() && is_name(rule.end_name));
  };
  for (;;) {
    if (!args.empty()) expect_op(",");
    if (ended()) break;
    args.push_back(rule.targets ? parse_primary() : parse_expression(rule.conditionals));
    if (!is_op(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !args.empty()) return std::move(args[0]);
  if (!is_tuple && !rule.parenthesised) fail_unexpected("an expression");
  return make(ExprKind::kTuple, line, "", std::move(args));
}

ExprPtr ExpressionParser::parse_target(std::string_view end_name, bool tuples) {
  if (token().type == TokenType::kName && look().type == TokenType::kOperator && look().text == ".") {
    const int line = token().line;
    ExprPtr space = make(ExprKind::kName, line, advance().text, {});
    advance();
    return make(ExprKind::kAttr, line, expect_any_name(), list_of(std::move(space)));
  }
  ExprPtr target = tuples ? parse_tuple({.targets = true, .end_name = end_name}) : parse_primary();
  const auto assignable = [](const Expr& e, const auto& self) -> bool {
    if (e.kind == ExprKind::kName) return true;
    return e.kind == ExprKind::kTuple &&
           std::all_of(e.args.begin(), e.args.end(), [&](const ExprPtr& arg) { return self(*arg, self); });
  };
  if (!assignable(*target, assignable)) fail_at(target->line, "cannot assign to this expression");
  return target;
}

ExprPtr ExpressionParser::parse_postfix(ExprPtr node) {
  for (;;) {
    const int line = token().line;
    if (is_op(".") || is_op("[")) {
      node = parse_subscript(std::move(node));
    } else if (is_op("(")) {
      node = make(ExprKind::kCall, line, "", list_of(std::move(node)));
      node->call = parse_call_arguments();
    } else {
      return node;
    }
  }
}

ExprPtr ExpressionParser::parse_subscript(ExprPtr node) {
  const int line = token().line;
  if (accept_op("[")) {
    node = parse_subscript_part(std::move(node));
    expect_op("]");
    return node;
  }
  expect_op(".");
  if (token().type == TokenType::kInteger)
    return make(ExprKind::kItem, line, "", list_of(std::move(node), parse_literal()));
  return make(ExprKind::kAttr, line, expect_any_name(), list_of(std::move(node)));
}

// Parses the contents of a subscript: an index, a slice, or several indices, which form a tuple.
ExprPtr ExpressionParser::parse_subscript_part(ExprPtr node) {
  const int line = token().line;
  ExprPtr key = is_op(":") ? nullptr : parse_expression();
  if (is_op(":")) {
    std::vector<ExprPtr> parts = list_of(std::move(node), std::move(key));
    while (accept_op(":")) {
      if (parts.size() == 4) fail_unexpected("']'");
      parts.push_back(is_op(":") || is_op("]") ? nullptr : parse_expression());
    }
    parts.resize(4);
    return make(ExprKind::kSlice, line, "", std::move(parts));
  }
  if (is_op(",")) {
    std::vector<ExprPtr> keys = list_of(std::move(key));
    while (accept_op(",") && !is_op("]")) keys.push_back(parse_expression());
    key = make(ExprKind::kTuple, line, "", std::move(keys));
  }
  return make(ExprKind::kItem, line, "", list_of(std::move(node), std::move(key)));
}

std::vector<Argument> ExpressionParser::parse_call_arguments() {
  expect_op("(");
  std::vector<Argument> arguments;
  const auto has = [&](Argument::Kind kind) {
    return std::any_of(arguments.begin(), arguments.end(), [&](const Argument& a) { return a.kind == kind; });
  };
  while (!is_op(")")) {
    if (!arguments.empty()) expect_op(",");
    if (is_op(")")) break;
    const int line = token().line;
    Argument argument{Argument::kPlain, "", nullptr};
    if (accept_op("*")) {
      argument.kind = Argument::kSpread;
    } else if (accept_op("**")) {
      argument.kind = Argument::kSpreadKeywords;
    } else if (token().type == TokenType::kName && look().type == TokenType::kOperator &&
               look().text == "=") {
      argument.kind = Argument::kKeyword;
      argument.keyword = advance().text;
      advance();
    }
    const bool late =
        has(Argument::kSpreadKeywords) || (argument.kind == Argument::kSpread && has(Argument::kSpread)) ||
        (argument.kind == Argument::kPlain && (has(Argument::kSpread) || has(Argument::kKeyword)));
    if (late) fail_at(line, "invalid syntax for function call expression");
    argument.value = parse_expression();
    arguments.push_back(std::move(argument));
  }
  expect_op(")");
  return arguments;
}

ExprPtr ExpressionParser::parse_filter_chain(ExprPtr node) {
  for (;;) {
    const int line = token().line;
    if (is_op("|")) {
      node = parse_filters(std::move(node), false);
    } else if (is_name("is")) {
      node = parse_test(std::move(node));
    } else if (is_op("(")) {
      node = make(ExprKind::kCall, line, "", list_of(std::move(node)));
      node->call = parse_call_arguments();
    } else {
      return node;
    }
  }
}

std::string ExpressionParser::parse_dotted_name() {
  std::string name = expect_any_name();
  while (accept_op(".")) name += "." + expect_any_name();
  return name;
}

ExprPtr ExpressionParser::parse_filters(ExprPtr node, bool is_first) {
  while (is_first || accept_op("|")) {
    is_first = false;
    const int line = token().line;
    std::string name = parse_dotted_name();
    if (conditional_ == 0 && find_filter(name) == nullptr) fail_at(line, "no filter named '" + name + "'");
    std::vector<ExprPtr> args;
    if (node != nullptr) args = list_of(std::move(node));
    node = make(ExprKind::kFilter, line, std::move(name), std::move(args));
    if (is_op("(")) node->call = parse_call_arguments();
  }
  return node;
}

ExprPtr ExpressionParser::parse_test(ExprPtr node) {
  const int line = advance().line;
  const bool negated = accept_name("not");
  std::string name = parse_dotted_name();
  if (conditional_ == 0 && find_test(name) == nullptr) fail_at(line, "no test named '" + name + "'");
  node = make(ExprKind::kTest, line, std::move(name), list_of(std::move(node)));
  const TokenType type = token().type;
  const bool literal = type == TokenType::kName || type == TokenType::kString ||
                       type == TokenType::kInteger || type == TokenType::kFloat || is_op("[") || is_op("{");
  if (is_op("(")) {
    node->call = parse_call_arguments();
  } else if (literal && !is_any_name({"else", "or", "and"})) {
    if (is_name("is")) fail_at(line, "tests cannot be chained with is");
    node->call.push_back({Argument::kPlain, "", parse_postfix(parse_primary())});
  }
  return negated ? make(ExprKind::kNot, line, "", list_of(std::move(node))) : std::move(node);
}

}  // namespace fp4moe::jinja
