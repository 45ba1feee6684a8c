#include "io/jinja/parser.h"

#include <algorithm>

#include "io/jinja/expression_parser.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

Stmt statement(StmtKind kind, int line) { return Stmt{kind, line, "", false, {}, {}, {}, {}, {}, {}, {}}; }

class Parser : ExpressionParser {
 public:
  explicit Parser(std::vector<Token> tokens) : ExpressionParser(std::move(tokens)) {}

  Body run() {
    Body body = parse_body({});
    if (token().type != TokenType::kEnd) fail_at(token().line, "unexpected tag '" + token().text + "'");
    return body;
  }

 private:
  using Names = std::initializer_list<std::string_view>;

  // Parses statements up to a block that begins with one of `ends`; that name becomes the current token.
  Body parse_body(Names ends) {
    const Nesting nesting(*this);
    Body body;
    while (token().type != TokenType::kEnd) {
      const int line = token().line;
      if (token().type == TokenType::kData) {
        body.push_back(statement(StmtKind::kText, line));
        body.back().text = advance().text;
      } else if (token().type == TokenType::kPrintBegin) {
        advance();
        body.push_back(statement(StmtKind::kPrint, line));
        body.back().value = parse_tuple({});
        expect(TokenType::kPrintEnd);
      } else {
        expect(TokenType::kBlockBegin);
        if (token().type != TokenType::kName) fail_unexpected("a tag name");
        if (is_any_name(ends)) return body;
        if (ends.size() == 0 && token().text.starts_with("end")) return body;
        body.push_back(parse_statement());
        expect(TokenType::kBlockEnd);
      }
    }
    if (ends.size() > 0)
      fail_at(token().line, "unexpected end of template, expected '" + std::string(*(ends.end() - 1)) + "'");
    return body;
  }

  // Parses from the end of the opening tag through the name of the closing tag.
  Body parse_block(std::string_view end) {
    expect(TokenType::kBlockEnd);
    Body body = parse_body({end});
    advance();
    return body;
  }

  Stmt parse_statement() {
    const Token tag = advance();
    const std::string& name = tag.text;
    if (name == "if") return parse_if(tag.line);
    if (name == "for") return parse_for(tag.line);
    if (name == "set") return parse_set(tag.line);
    if (name == "macro") return parse_macro(tag.line);
    if (name == "call") return parse_call(tag.line);
    if (name == "filter") return parse_filter_block(tag.line);
    if (name == "with") return parse_with(tag.line);
    if (name == "generation") {
      Stmt stmt = statement(StmtKind::kScope, tag.line);
      stmt.bodies.push_back(parse_block("endgeneration"));
      return stmt;
    }
    if (name == "print") {
      Stmt stmt = statement(StmtKind::kPrint, tag.line);
      stmt.value = parse_tuple({});
      return stmt;
    }
    if (name == "break" || name == "continue") {
      if (loops_ == 0) fail_at(tag.line, "'" + name + "' outside of a loop");
      return statement(name == "break" ? StmtKind::kBreak : StmtKind::kContinue, tag.line);
    }
    fail_at(tag.line, "unknown tag '" + name + "'");
  }

  Stmt parse_if(int line) {
    Stmt stmt = statement(StmtKind::kIf, line);
    stmt.tests.push_back(parse_tuple({.conditionals = false}));
    ++conditional_;
    for (;;) {
      expect(TokenType::kBlockEnd);
      const bool last = stmt.bodies.size() == stmt.tests.size();
      stmt.bodies.push_back(last ? parse_body({"endif"}) : parse_body({"elif", "else", "endif"}));
      const std::string tag = advance().text;
      if (tag == "endif") break;
      if (tag == "elif") stmt.tests.push_back(parse_tuple({.conditionals = false}));
    }
    --conditional_;
    return stmt;
  }

  Stmt parse_for(int line) {
    Stmt stmt = statement(StmtKind::kFor, line);
    stmt.target = parse_target("in");
    expect_name("in");
    stmt.value = parse_tuple({.conditionals = false, .end_name = "recursive"});
    if (accept_name("if")) stmt.tests.push_back(parse_expression());
    stmt.recursive = accept_name("recursive");
    expect(TokenType::kBlockEnd);
    ++loops_;
    stmt.bodies.push_back(parse_body({"else", "endfor"}));
    --loops_;
    if (advance().text == "else") stmt.bodies.push_back(parse_block("endfor"));
    return stmt;
  }

  Stmt parse_set(int line) {
    Stmt stmt = statement(StmtKind::kSet, line);
    stmt.target = parse_target();
    if (accept_op("=")) {
      stmt.value = parse_tuple({});
      return stmt;
    }
    stmt.kind = StmtKind::kSetBlock;
    if (is_op("|")) stmt.value = parse_filters(nullptr, false);
    stmt.bodies.push_back(parse_block("endset"));
    return stmt;
  }

  Stmt parse_macro(int line) {
    Stmt stmt = statement(StmtKind::kMacro, line);
    stmt.macro = std::make_unique<Macro>();
    stmt.macro->name = expect_any_name();
    parse_macro_rest(*stmt.macro, "endmacro");
    return stmt;
  }

  Stmt parse_call(int line) {
    Stmt stmt = statement(StmtKind::kCall, line);
    stmt.macro = std::make_unique<Macro>();
    if (is_op("(")) parse_signature(*stmt.macro);
    stmt.value = parse_expression();
    if (stmt.value->kind != ExprKind::kCall) fail_at(line, "expected a call");
    parse_macro_body(*stmt.macro, "endcall");
    return stmt;
  }

  void parse_macro_rest(Macro& macro, std::string_view end) {
    parse_signature(macro);
    parse_macro_body(macro, end);
  }

  void parse_signature(Macro& macro) {
    expect_op("(");
    while (!is_op(")")) {
      if (!macro.params.empty()) expect_op(",");
      const int line = token().line;
      macro.params.push_back(expect_any_name());
      if (accept_op("=")) {
        macro.defaults.push_back(parse_expression());
      } else if (!macro.defaults.empty()) {
        fail_at(line, "non-default argument follows default argument");
      }
    }
    expect_op(")");
  }

  // A macro is a separate function: break cannot leave it.
  void parse_macro_body(Macro& macro, std::string_view end) {
    const int outer_loops = std::exchange(loops_, 0);
    open_macros_.push_back(&macro);
    macro.body = parse_block(end);
    open_macros_.pop_back();
    loops_ = outer_loops;
  }

  Stmt parse_filter_block(int line) {
    Stmt stmt = statement(StmtKind::kFilter, line);
    stmt.value = parse_filters(nullptr, true);
    stmt.bodies.push_back(parse_block("endfilter"));
    return stmt;
  }

  Stmt parse_with(int line) {
    Stmt stmt = statement(StmtKind::kScope, line);
    while (token().type != TokenType::kBlockEnd) {
      if (!stmt.targets.empty()) expect_op(",");
      stmt.targets.push_back(parse_target({}, false));
      expect_op("=");
      stmt.values.push_back(parse_expression());
    }
    stmt.bodies.push_back(parse_block("endwith"));
    return stmt;
  }

  int loops_ = 0;  // enclosing for loops that break can leave
};

}  // namespace

Body parse_template(std::string_view source) {
  if (source.size() > kMaxSourceBytes)
    throw Error{ErrorKind::kLimit,
                "the template has " + std::to_string(source.size()) + " bytes; legal: at most " +
                    std::to_string(kMaxSourceBytes),
                1};
  if (!is_valid_utf8(source)) throw Error{ErrorKind::kSyntax, "the template is not valid UTF-8", 1};
  return Parser(tokenize(source)).run();
}

}  // namespace fp4moe::jinja
