// The syntax tree of a template.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/jinja/value.h"

namespace fp4moe::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

enum class ExprKind {
  kConst,  // value
  kName,   // text
  kList,
  kTuple,  // args
  kDict,   // args: key, value, key, value ...
  kCond,   // args: test, then[, else]
  kOr,
  kAnd,
  kNot,
  kNeg,
  kPos,
  kBinary,   // op
  kConcat,   // args joined by ~
  kCompare,  // args[0] ops[0] args[1] ops[1] ...
  kAttr,     // args[0].text
  kItem,     // args[0][args[1]]
  kSlice,    // args[0][args[1]:args[2]:args[3]], absent bounds null
  kCall,     // args[0](call)
  kFilter,   // args[0] | text(call); args empty: the text captured by a filter block
  kTest,     // args[0] is text(call)
};

struct Argument {
  enum Kind { kPlain, kKeyword, kSpread, kSpreadKeywords } kind;
  std::string keyword;
  ExprPtr value;
};

struct Expr {
  ExprKind kind;
  int line;
  int height = 1;  // of the tree from here down
  std::string text;
  Value value;                   // of a constant; for a string, `text` owns the bytes
  std::vector<std::string> ops;  // of kBinary (one) and kCompare
  std::vector<ExprPtr> args;
  std::vector<Argument> call;
};

struct Stmt;
using Body = std::vector<Stmt>;

struct Macro {
  std::string name;  // empty: the body of a call block
  std::vector<std::string> params;
  std::vector<ExprPtr> defaults;  // for the last params
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;
  Body body;
};

enum class StmtKind {
  kText,      // text
  kPrint,     // value (printed)
  kIf,        // if tests[i] then bodies[i]; an additional body is the else body
  kFor,       // target in value, filtered by tests[0]; bodies: that of the loop, that of else
  kSet,       // target = value
  kSetBlock,  // target = output of bodies[0], through the filters of value if not null
  kMacro,     // macro
  kCall,      // value(caller=macro)
  kFilter,    // bodies[0] through the filters of value
  kScope,     // bodies[0] in a new scope, with targets[i] = values[i]
  kBreak,
  kContinue,
};

struct Stmt {
  StmtKind kind;
  int line;
  std::string text;
  bool recursive = false;  // of kFor
  ExprPtr target, value;
  std::vector<ExprPtr> tests, targets, values;
  std::vector<Body> bodies;
  std::unique_ptr<Macro> macro;
};

}  // namespace fp4moe::jinja
