// Interpreter: renders a syntax tree, which it only reads. One interpreter per rendering.
#pragma once

#include <memory_resource>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/jinja/ast.h"
#include "io/jinja/callable.h"
#include "io/jinja/heap.h"

namespace fp4moe::jinja {

// Variables of one block. Allocated in the heap, because macros and callers may outlive the block.
struct Scope {
  Scope(Heap& heap, Scope* outer) : parent(outer), variables(heap.memory()) {}
  Value* find(std::string_view name);
  void set(std::string_view name, const Value& value);

  Scope* parent;
  std::pmr::vector<std::pair<std::string_view, Value>> variables;
};

// Large because each kind of statement and expression is a method.
class Interpreter {
 public:
  explicit Interpreter(Heap& heap);

  // Sets a variable of the template; `name` must outlive the interpreter.
  void set(std::string_view name, const Value& value) { scope_->set(name, value); }
  // Returns the rendered text. Throws Error with the template's line.
  std::string render(const Body& body);

  // The following functions are for builtins.
  Value attribute(const Value& object, std::string_view name);  // object.name
  Value item(const Value& object, const Value& key);            // object[key]
  Value apply_filter(std::string_view name, const Value& subject, const Arguments& arguments);
  bool apply_test(std::string_view name, const Value& subject, const Arguments& arguments);

 private:
  enum class Flow { kNext, kBreak, kContinue };

  Flow run(const Body& body);
  Flow run(const Stmt& stmt);
  Flow run_if(const Stmt& stmt);
  Flow run_for(const Stmt& stmt);
  Flow run_scope(const Stmt& stmt);
  void run_loop(const Stmt& stmt, const Value& iterable, Scope* outer, int depth, Flow& flow);
  std::span<const Value> loop_items(const Stmt& stmt, const Value& iterable, Scope* outer);
  void run_call_block(const Stmt& stmt);
  void write(std::string_view text);
  // Returns the text that `body` writes when it runs in a new scope.
  std::string_view capture(const Body& body);
  std::string_view capture_loop(const Loop& loop, const Value& iterable);
  void assign(const Expr& target, const Value& value);
  void assign_member(const Expr& target, const Value& value);
  void define_macro(const Stmt& stmt);
  Value filtered(const Expr* filters, std::string_view text);

  Value eval(const Expr& e);
  Value eval_inner(const Expr& e);
  Value eval_name(const Expr& e);
  Value eval_dict(const Expr& e);
  Value eval_compare(const Expr& e);
  Value eval_concat(const Expr& e);
  Value eval_slice(const Expr& e);
  Value eval_call(const Expr& e, const Callable* caller);
  Value eval_filter(const Expr& e);
  bool eval_test(const Expr& e);
  std::vector<Value> eval_all(const std::vector<ExprPtr>& args);
  Arguments eval_arguments(const std::vector<Argument>& call);
  void spread_keywords(const Value& value, Arguments& arguments);

  Value call(const Value& callee, const Arguments& arguments);
  Value call_builtin(const Builtin& builtin, const Value& self, const Arguments& arguments);
  Value call_macro(const Callable& callee, const Arguments& arguments);
  void bind_macro(const Macro& macro, const Arguments& arguments);
  Value loop_attribute(const Loop& loop, std::string_view name, const Value& object);

  Heap& heap_;
  Scope* scope_;
  std::string* out_ = nullptr;
  Value captured_;  // output captured by the innermost filter block
  int line_ = 0;
};

// Python's operators.
Value binary(Heap& heap, std::string_view op, const Value& a, const Value& b);
Value negative(const Value& value);
bool compare_values(Heap& heap, std::string_view op, const Value& a, const Value& b);
struct SliceBounds {
  const Value *start, *stop, *step;  // null or None if absent
};
Value slice(Heap& heap, const Value& object, const SliceBounds& bounds);

}  // namespace fp4moe::jinja
