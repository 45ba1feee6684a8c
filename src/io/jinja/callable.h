// The callables of templates: built-in filters, tests, methods and functions, and macros.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "io/jinja/ast.h"
#include "io/jinja/value.h"

namespace fp4moe::jinja {

class Interpreter;
struct Scope;

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;
};

// One call to a builtin, with its arguments bound to the builtin's parameters.
struct Call {
  Interpreter& interpreter;
  Heap& heap;
  const Value& self;                // the filtered or tested value, or the method's object
  const Arguments& given;           // as given in the call
  std::vector<const Value*> bound;  // by parameter; null if not given

  bool has(size_t i) const { return i < bound.size() && bound[i] != nullptr; }
  const Value& arg(size_t i) const { return *bound[i]; }
  Value arg_or(size_t i, Value fallback) const { return has(i) ? arg(i) : fallback; }
  int64_t int_or(size_t i, int64_t fallback) const {
    return has(i) ? to_index(arg(i), "argument") : fallback;
  }
  bool truth_or(size_t i, bool fallback) const { return has(i) ? truth(arg(i)) : fallback; }
};

struct Builtin {
  std::string_view name;
  std::string_view params;  // names separated by spaces; a final "*" accepts any further arguments
  int required;             // number of required parameters
  Value (*run)(Call& call);
};

struct Callable {
  const Builtin* builtin = nullptr;  // either this or `macro` is set
  const Macro* macro = nullptr;
  Value self = {};           // a method's object
  Scope* closure = nullptr;  // of a macro: the scope it was defined in
};

// A for loop's state: the template's variable `loop`.
struct Loop {
  const Stmt* stmt;
  Scope* outer;  // the scope around the loop
  std::span<const Value> items;
  int depth;  // 1-based recursion depth
  size_t at = 0;
  const Sequence* last_seen = nullptr;  // arguments of the last loop.changed
};

std::string_view callable_type_name(const Callable& callable);
bool same_callable(const Callable& a, const Callable& b);

}  // namespace fp4moe::jinja
