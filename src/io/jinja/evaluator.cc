// The expression half of Interpreter: evaluates expressions.
#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

Value Interpreter::eval(const Expr& e) {
  heap_.step();
  line_ = e.line;
  if (e.kind == ExprKind::kConst) return e.value;
  if (e.kind == ExprKind::kName) return eval_name(e);
  const Heap::Level level(heap_);
  return eval_inner(e);
}

Value Interpreter::eval_inner(const Expr& e) {
  switch (e.kind) {
    case ExprKind::kConst:
      return e.value;
    case ExprKind::kName:
      return eval_name(e);
    case ExprKind::kList:
      return list_value(heap_, eval_all(e.args));
    case ExprKind::kTuple:
      return sequence_value(heap_, SequenceType::kTuple, eval_all(e.args));
    case ExprKind::kDict:
      return eval_dict(e);
    case ExprKind::kCond:
      if (truth(eval(*e.args[0]))) return eval(*e.args[1]);
      return e.args.size() > 2 ? eval(*e.args[2])
                               : missing_variable(heap_, "the inline if-expression without else");
    case ExprKind::kOr: {
      Value left = eval(*e.args[0]);
      return truth(left) ? left : eval(*e.args[1]);
    }
    case ExprKind::kAnd: {
      Value left = eval(*e.args[0]);
      return truth(left) ? eval(*e.args[1]) : left;
    }
    case ExprKind::kNot:
      return Value(!truth(eval(*e.args[0])));
    case ExprKind::kNeg:
      return negative(eval(*e.args[0]));
    case ExprKind::kPos:
      return negative(negative(eval(*e.args[0])));
    case ExprKind::kBinary: {
      const Value left = eval(*e.args[0]), right = eval(*e.args[1]);
      line_ = e.line;
      return binary(heap_, e.ops[0], left, right);
    }
    case ExprKind::kConcat:
      return eval_concat(e);
    case ExprKind::kCompare:
      return eval_compare(e);
    case ExprKind::kAttr:
      return attribute(eval(*e.args[0]), e.text);
    case ExprKind::kItem: {
      const Value object = eval(*e.args[0]), key = eval(*e.args[1]);
      line_ = e.line;
      return item(object, key);
    }
    case ExprKind::kSlice:
      return eval_slice(e);
    case ExprKind::kCall:
      return eval_call(e, nullptr);
    case ExprKind::kFilter:
      return eval_filter(e);
    case ExprKind::kTest:
      return Value(eval_test(e));
  }
  return Value();
}

std::vector<Value> Interpreter::eval_all(const std::vector<ExprPtr>& args) {
  std::vector<Value> values;
  values.reserve(args.size());
  for (const ExprPtr& arg : args) values.push_back(eval(*arg));
  return values;
}

Value Interpreter::eval_name(const Expr& e) {
  for (Scope* scope = scope_; scope != nullptr; scope = scope->parent)
    if (const Value* value = scope->find(e.text)) return *value;
  if (const Builtin* function = find_function(e.text))
    return Value(static_cast<const Callable*>(heap_.make<Callable>(function, nullptr, Value())));
  return missing_variable(heap_, e.text);
}

Value Interpreter::eval_dict(const Expr& e) {
  DictBuilder builder(heap_);
  for (size_t i = 0; i < e.args.size(); i += 2) {
    const Value key = eval(*e.args[i]);
    builder.set(key, eval(*e.args[i + 1]));
  }
  return Value(builder.finish());
}

Value Interpreter::eval_compare(const Expr& e) {
  Value left = eval(*e.args[0]);
  for (size_t i = 0; i < e.ops.size(); ++i) {
    const Value right = eval(*e.args[i + 1]);
    line_ = e.line;
    if (!compare_values(heap_, e.ops[i], left, right)) return Value(false);
    left = right;
  }
  return Value(true);
}

// Without automatic escaping, ~ concatenates markup as plain text.
Value Interpreter::eval_concat(const Expr& e) {
  std::string text;
  for (const Value& value : eval_all(e.args)) {
    text += to_text(heap_, value);
    heap_.checked_bytes(text.size(), 1);
  }
  return heap_text(heap_, text);
}

Value Interpreter::eval_slice(const Expr& e) {
  const Value object = eval(*e.args[0]);
  Value bounds[3];
  for (size_t i = 0; i < 3; ++i) bounds[i] = e.args[i + 1] == nullptr ? Value(None{}) : eval(*e.args[i + 1]);
  line_ = e.line;
  return slice(heap_, object, {&bounds[0], &bounds[1], &bounds[2]});
}

Arguments Interpreter::eval_arguments(const std::vector<Argument>& call) {
  Arguments arguments;
  for (const Argument& argument : call) {
    const Value value = eval(*argument.value);
    switch (argument.kind) {
      case Argument::kPlain:
        arguments.positional.push_back(value);
        break;
      case Argument::kKeyword:
        arguments.named.emplace_back(argument.keyword, value);
        break;
      case Argument::kSpread:
        for (const Value& item : iterate(heap_, value)) arguments.positional.push_back(item);
        break;
      case Argument::kSpreadKeywords:
        spread_keywords(value, arguments);
        break;
    }
  }
  return arguments;
}

void Interpreter::spread_keywords(const Value& value, Arguments& arguments) {
  const Dict* dict = value.dict();
  if (dict == nullptr) fail("argument after ** must be a mapping, not " + std::string(type_name(value)));
  for (const auto& [key, member] : dict->entries)
    arguments.named.emplace_back(require_text(key, "keywords"), member);
}

Value Interpreter::eval_call(const Expr& e, const Callable* caller) {
  const Value callee = eval(*e.args[0]);
  Arguments arguments = eval_arguments(e.call);
  if (caller != nullptr) arguments.named.emplace_back("caller", Value(caller));
  line_ = e.line;
  return call(callee, arguments);
}

Value Interpreter::eval_filter(const Expr& e) {
  const Value subject = e.args.empty() ? captured_ : eval(*e.args[0]);
  const Arguments arguments = eval_arguments(e.call);
  line_ = e.line;
  return apply_filter(e.text, subject, arguments);
}

bool Interpreter::eval_test(const Expr& e) {
  const Value subject = eval(*e.args[0]);
  const Arguments arguments = eval_arguments(e.call);
  line_ = e.line;
  return apply_test(e.text, subject, arguments);
}

Value Interpreter::loop_attribute(const Loop& loop, std::string_view name, const Value& object) {
  const auto at = static_cast<int64_t>(loop.at), size = static_cast<int64_t>(loop.items.size());
  if (name == "index") return Value(at + 1);
  if (name == "index0") return Value(at);
  if (name == "revindex") return Value(size - at);
  if (name == "revindex0") return Value(size - at - 1);
  if (name == "first") return Value(at == 0);
  if (name == "last") return Value(at + 1 == size);
  if (name == "length") return Value(size);
  if (name == "depth") return Value(int64_t{loop.depth});
  if (name == "depth0") return Value(int64_t{loop.depth} - 1);
  if (name == "previtem")
    return at > 0 ? loop.items[loop.at - 1] : missing_variable(heap_, "there is no previous item");
  if (name == "nextitem")
    return at + 1 < size ? loop.items[loop.at + 1] : missing_variable(heap_, "there is no next item");
  return missing_member(heap_, object, text_value(name));
}

Value Interpreter::attribute(const Value& object, std::string_view name) {
  const bool exists = !object.is<Undefined>() || name == "__class__";
  if (name.starts_with("__") && exists) return forbidden_member(heap_, object, name);
  require_defined(object);
  if (const Builtin* method = find_method(object, name))
    return Value(static_cast<const Callable*>(heap_.make<Callable>(method, nullptr, object)));
  if (is_forbidden_attribute(object, name)) return forbidden_member(heap_, object, name);
  if (object.is<Loop*>()) return loop_attribute(*std::get<Loop*>(object), name, object);
  if (object.is<Namespace*>()) {
    const auto& members = std::get<Namespace*>(object)->members;
    if (const auto place = members.find(name); place != members.end()) return place->second;
  }
  if (const Dict* dict = object.dict())
    if (const Value* value = find(heap_, *dict, text_value(name))) return *value;
  if (const Sequence* s = object.sequence(); s != nullptr && s->type == SequenceType::kGroup) {
    if (name == "grouper") return s->items[0];
    if (name == "list") return s->items[1];
  }
  return missing_member(heap_, object, text_value(name));
}

Value Interpreter::item(const Value& object, const Value& key) {
  require_defined(object);
  if (const Dict* dict = object.dict()) {
    const bool hashable =
        key.dict() == nullptr && (key.sequence() == nullptr || key.sequence()->type == SequenceType::kTuple);
    if (const Value* value = hashable ? find(heap_, *dict, key) : nullptr) return *value;
  }
  const Sequence* s = object.sequence();
  const bool indexable = object.is<Text>() || (s != nullptr && s->type <= SequenceType::kRange);
  if (indexable && key.is_integral()) {
    const int64_t size = length(heap_, object), given = to_index(key, "index"),
                  at = given < 0 ? given + size : given;
    if (at < 0 || at >= size) return missing_member(heap_, object, key);
    if (s != nullptr) return s->items[static_cast<size_t>(at)];
    const Text& text = *object.as<Text>();
    const size_t begin = byte_position(text.bytes, static_cast<size_t>(at));
    return text_value(text.bytes.substr(begin, byte_position(text.bytes.substr(begin), 1)), text.safe);
  }
  if (const Text* name = key.as<Text>(); name != nullptr && object.dict() == nullptr)
    return attribute(object, name->bytes);
  if (const Text* name = key.as<Text>()) {
    if (const Builtin* method = find_method(object, name->bytes))
      return Value(static_cast<const Callable*>(heap_.make<Callable>(method, nullptr, object)));
    if (is_forbidden_attribute(object, name->bytes)) return forbidden_member(heap_, object, name->bytes);
  }
  return missing_member(heap_, object, key);
}

}  // namespace fp4moe::jinja
