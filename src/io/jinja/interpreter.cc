#include "io/jinja/interpreter.h"

#include "io/jinja/builtins.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

Value* Scope::find(std::string_view name) {
  for (auto& [key, value] : variables)
    if (key == name) return &value;
  return nullptr;
}

void Scope::set(std::string_view name, const Value& value) {
  if (Value* known = find(name)) {
    *known = value;
  } else {
    variables.emplace_back(name, value);
  }
}

Interpreter::Interpreter(Heap& heap) : heap_(heap), scope_(heap.make<Scope>(heap, nullptr)) {}

std::string Interpreter::render(const Body& body) {
  std::string out;
  out_ = &out;
  try {
    run(body);
  } catch (Error& error) {
    if (error.line == 0) error.line = line_;
    throw;
  }
  return out;
}

void Interpreter::write(std::string_view text) {
  if (text.size() > heap_.limits().output - out_->size())
    limit("the template wrote more than " + std::to_string(heap_.limits().output) + " bytes");
  out_->append(text);
}

std::string_view Interpreter::capture(const Body& body) {
  std::string text;
  std::string* const outer_out = std::exchange(out_, &text);
  Scope* const outer = scope_;
  scope_ = heap_.make<Scope>(heap_, outer);
  run(body);
  scope_ = outer;
  out_ = outer_out;
  return heap_.text(text);
}

Interpreter::Flow Interpreter::run(const Body& body) {
  const Heap::Level level(heap_);
  for (const Stmt& stmt : body)
    if (const Flow flow = run(stmt); flow != Flow::kNext) return flow;
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const Stmt& stmt) {
  heap_.step();
  line_ = stmt.line;
  switch (stmt.kind) {
    case StmtKind::kText:
      write(stmt.text);
      break;
    case StmtKind::kPrint:
      write(to_text(heap_, eval(*stmt.value)));
      break;
    case StmtKind::kIf:
      return run_if(stmt);
    case StmtKind::kFor:
      return run_for(stmt);
    case StmtKind::kSet:
      assign(*stmt.target, eval(*stmt.value));
      break;
    case StmtKind::kSetBlock:
      assign(*stmt.target, filtered(stmt.value.get(), capture(stmt.bodies[0])));
      break;
    case StmtKind::kMacro:
      define_macro(stmt);
      break;
    case StmtKind::kCall:
      run_call_block(stmt);
      break;
    case StmtKind::kFilter:
      write(to_text(heap_, filtered(stmt.value.get(), capture(stmt.bodies[0]))));
      break;
    case StmtKind::kScope:
      return run_scope(stmt);
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run_if(const Stmt& stmt) {
  for (size_t i = 0; i < stmt.bodies.size(); ++i)
    if (i == stmt.tests.size() || truth(eval(*stmt.tests[i]))) return run(stmt.bodies[i]);
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run_for(const Stmt& stmt) {
  Flow flow = Flow::kNext;
  run_loop(stmt, eval(*stmt.value), scope_, 1, flow);
  return flow;
}

// Returns the items that pass the loop's `if` filter, which sees the target but not `loop`.
std::span<const Value> Interpreter::loop_items(const Stmt& stmt, const Value& iterable, Scope* outer) {
  line_ = stmt.line;
  const Sequence* s = iterable.sequence();
  if (stmt.tests.empty() && s != nullptr && s->type != SequenceType::kGenerator) return s->items;
  const std::vector<Value> items = iterate(heap_, iterable);
  if (stmt.tests.empty()) return heap_.items(items);
  std::vector<Value> kept;
  scope_ = heap_.make<Scope>(heap_, outer);
  for (const Value& item : items) {
    assign(*stmt.target, item);
    if (truth(eval(*stmt.tests[0]))) kept.push_back(item);
  }
  return heap_.items(kept);
}

void Interpreter::run_loop(const Stmt& stmt, const Value& iterable, Scope* outer, int depth, Flow& flow) {
  const Heap::Level level(heap_);
  Scope* const caller = scope_;
  Loop* loop = heap_.make<Loop>(&stmt, outer, loop_items(stmt, iterable, outer), depth);
  scope_ = heap_.make<Scope>(heap_, outer);
  for (; loop->at < loop->items.size(); ++loop->at) {
    heap_.step();
    line_ = stmt.line;
    scope_->variables.clear();
    scope_->set("loop", Value(loop));
    assign(*stmt.target, loop->items[loop->at]);
    if (run(stmt.bodies[0]) == Flow::kBreak) break;
  }
  if (loop->items.empty() && stmt.bodies.size() > 1) {
    scope_->variables.clear();
    flow = run(stmt.bodies[1]);  // break in the else body leaves the enclosing loop
  }
  scope_ = caller;
}

std::string_view Interpreter::capture_loop(const Loop& loop, const Value& iterable) {
  std::string text;
  std::string* const outer_out = std::exchange(out_, &text);
  Flow flow = Flow::kNext;
  run_loop(*loop.stmt, iterable, loop.outer, loop.depth + 1, flow);
  out_ = outer_out;
  return heap_.text(text);
}

Interpreter::Flow Interpreter::run_scope(const Stmt& stmt) {
  Scope* const outer = scope_;
  const std::vector<Value> values = eval_all(stmt.values);
  scope_ = heap_.make<Scope>(heap_, outer);
  for (size_t i = 0; i < values.size(); ++i) assign(*stmt.targets[i], values[i]);
  const Flow flow = run(stmt.bodies[0]);
  scope_ = outer;
  return flow;
}

void Interpreter::run_call_block(const Stmt& stmt) {
  const Callable* caller = heap_.make<Callable>(nullptr, stmt.macro.get(), Value(), scope_);
  write(to_text(heap_, eval_call(*stmt.value, caller)));
}

void Interpreter::define_macro(const Stmt& stmt) {
  const Callable* macro = heap_.make<Callable>(nullptr, stmt.macro.get(), Value(), scope_);
  scope_->set(stmt.macro->name, Value(macro));
}

Value Interpreter::filtered(const Expr* filters, std::string_view text) {
  if (filters == nullptr) return text_value(text);
  const Value outer = std::exchange(captured_, text_value(text));
  const Value result = eval(*filters);
  captured_ = outer;
  return result;
}

void Interpreter::assign(const Expr& target, const Value& value) {
  if (target.kind == ExprKind::kName) return scope_->set(target.text, value);
  if (target.kind == ExprKind::kAttr) return assign_member(target, value);
  const std::vector<Value> items = iterate(heap_, value);
  const std::string expected = std::to_string(target.args.size());
  if (items.size() < target.args.size())
    fail("not enough values to unpack (expected " + expected + ", got " + std::to_string(items.size()) + ")");
  if (items.size() > target.args.size()) fail("too many values to unpack (expected " + expected + ")");
  for (size_t i = 0; i < items.size(); ++i) assign(*target.args[i], items[i]);
}

void Interpreter::assign_member(const Expr& target, const Value& value) {
  const Value space = eval_name(*target.args[0]);
  if (!space.is<Namespace*>()) fail("cannot assign attribute on non-namespace object");
  std::get<Namespace*>(space)->members[target.text] = value;
}

Value Interpreter::call(const Value& callee, const Arguments& arguments) {
  require_defined(callee);
  if (callee.is<Loop*>()) {
    Loop* loop = std::get<Loop*>(callee);
    if (!loop->stmt->recursive) fail("The loop must have the 'recursive' marker to be called recursively.");
    if (arguments.positional.size() != 1 || !arguments.named.empty())
      fail("loop() takes exactly one argument");
    return text_value(capture_loop(*loop, arguments.positional[0]));
  }
  if (!callee.is<const Callable*>()) fail("'" + std::string(type_name(callee)) + "' object is not callable");
  const Callable& callable = *std::get<const Callable*>(callee);
  if (callable.macro != nullptr) return call_macro(callable, arguments);
  return call_builtin(*callable.builtin, callable.self, arguments);
}

Value Interpreter::call_builtin(const Builtin& builtin, const Value& self, const Arguments& arguments) {
  std::vector<std::string_view> params;
  if (!builtin.params.empty()) params = split(builtin.params, " ", -1, false);
  const bool open = !params.empty() && params.back() == "*";
  if (open) params.pop_back();
  const std::string name(builtin.name);
  if (!open && arguments.positional.size() > params.size())
    fail(name + "() takes at most " + std::to_string(params.size()) + " arguments, got " +
         std::to_string(arguments.positional.size()));
  Call bound{*this, heap_, self, arguments, std::vector<const Value*>(params.size(), nullptr)};
  for (size_t i = 0; i < params.size() && i < arguments.positional.size(); ++i)
    bound.bound[i] = &arguments.positional[i];
  for (const auto& [key, value] : arguments.named) {
    size_t i = 0;
    while (i < params.size() && params[i] != key) ++i;
    if (i == params.size()) {
      if (!open) fail(name + "() got an unexpected keyword argument '" + std::string(key) + "'");
    } else {
      if (bound.bound[i] != nullptr)
        fail(name + "() got multiple values for argument '" + std::string(key) + "'");
      bound.bound[i] = &value;
    }
  }
  for (size_t i = 0; i < static_cast<size_t>(builtin.required); ++i)
    if (!bound.has(i)) fail(name + "() is missing argument '" + std::string(params[i]) + "'");
  return builtin.run(bound);
}

Value Interpreter::call_macro(const Callable& callee, const Arguments& arguments) {
  const Heap::Level level(heap_);
  std::string text;
  std::string* const outer_out = std::exchange(out_, &text);
  Scope* const outer = std::exchange(scope_, heap_.make<Scope>(heap_, callee.closure));
  bind_macro(*callee.macro, arguments);
  run(callee.macro->body);
  scope_ = outer;
  out_ = outer_out;
  return heap_text(heap_, text);
}

// Sets the macro's parameters in the current scope.
void Interpreter::bind_macro(const Macro& macro, const Arguments& arguments) {
  const size_t num_params = macro.params.size(), first_default = num_params - macro.defaults.size();
  std::vector<bool> used(arguments.named.size(), false);
  for (size_t i = 0; i < num_params; ++i) {
    Value value = missing_variable(heap_, macro.params[i]);
    bool given = i < arguments.positional.size();
    if (given) value = arguments.positional[i];
    for (size_t k = 0; k < arguments.named.size(); ++k) {
      if (arguments.named[k].first != macro.params[i] || used[k]) continue;
      if (given)
        fail("macro '" + macro.name + "' got multiple values for argument '" + macro.params[i] + "'");
      value = arguments.named[k].second;
      given = used[k] = true;
    }
    if (!given && i >= first_default) value = eval(*macro.defaults[i - first_default]);
    scope_->set(macro.params[i], value);
  }
  DictBuilder rest(heap_);
  Value caller;
  for (size_t k = 0; k < arguments.named.size(); ++k) {
    const auto& [name, value] = arguments.named[k];
    if (used[k]) continue;
    if (name == "caller" && macro.uses_caller) {
      caller = value;
    } else if (macro.uses_kwargs) {
      rest.set(text_value(name), value);
    } else {
      fail("macro '" + macro.name + "' takes no keyword argument '" + std::string(name) + "'");
    }
  }
  if (macro.uses_caller && scope_->find("caller") == nullptr)
    scope_->set("caller", caller.is<Undefined>() ? missing_variable(heap_, "caller") : caller);
  if (macro.uses_kwargs) scope_->set("kwargs", Value(rest.finish()));
  std::vector<Value> more;
  if (arguments.positional.size() > num_params)
    more.assign(arguments.positional.begin() + static_cast<ptrdiff_t>(num_params),
                arguments.positional.end());
  if (macro.uses_varargs) {
    scope_->set("varargs", sequence_value(heap_, SequenceType::kTuple, more));
  } else if (!more.empty()) {
    fail("macro '" + macro.name + "' takes not more than " + std::to_string(num_params) + " argument(s)");
  }
}

Value Interpreter::apply_filter(std::string_view name, const Value& subject, const Arguments& arguments) {
  const Builtin* filter = find_filter(name);
  if (filter == nullptr) fail("no filter named '" + std::string(name) + "'");
  return call_builtin(*filter, subject, arguments);
}

bool Interpreter::apply_test(std::string_view name, const Value& subject, const Arguments& arguments) {
  const Builtin* test = find_test(name);
  if (test == nullptr) fail("no test named '" + std::string(name) + "'");
  return truth(call_builtin(*test, subject, arguments));
}

std::string_view callable_type_name(const Callable& callable) {
  if (callable.macro != nullptr) return "Macro";
  return callable.self.is<Undefined>() ? "function" : "builtin_function_or_method";
}

bool same_callable(const Callable& a, const Callable& b) {
  return a.builtin == b.builtin && a.macro == b.macro && a.closure == b.closure &&
         a.self.index() == b.self.index();
}

}  // namespace fp4moe::jinja
