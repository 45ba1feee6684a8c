// Value: the result of a Jinja expression, with Python's semantics. Lists, tuples and dicts are immutable
// (the sandbox forbids changes); only namespaces are mutable.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "io/jinja/heap.h"

namespace fp4moe::jinja {

struct Value;
struct Sequence;
struct Dict;
struct Namespace;
struct Callable;
struct Loop;

struct MissingName {
  std::string_view owner;  // type of the searched object, such as "dict"; empty: a variable
  std::string_view name;   // as printed after "has no attribute" or "has no element"
  bool element = false;
  bool forbidden = false;  // exists in Python, but the sandbox hides it
};

struct Undefined {
  const MissingName* missing = nullptr;
};
struct None {};
struct Text {
  std::string_view bytes;  // UTF-8
  bool safe = false;       // Markup: plain text joined with it is escaped
};

using ValueBase = std::variant<Undefined, None, bool, int64_t, double, Text, const Sequence*, const Dict*,
                               Namespace*, const Callable*, Loop*>;
struct Value : ValueBase {
  using ValueBase::ValueBase;
  Value(const char*) = delete;  // would become a bool

  template <class T>
  bool is() const {
    return std::holds_alternative<T>(*this);
  }
  template <class T>
  const T* as() const {
    return std::get_if<T>(this);
  }
  bool is_integral() const { return is<bool>() || is<int64_t>(); }
  bool is_number() const { return is_integral() || is<double>(); }
  const Sequence* sequence() const {
    return is<const Sequence*>() ? std::get<const Sequence*>(*this) : nullptr;
  }
  const Dict* dict() const { return is<const Dict*>() ? std::get<const Dict*>(*this) : nullptr; }
};

enum class SequenceType { kList, kTuple, kGroup, kRange, kGenerator, kKeys, kValues, kItems };

struct Sequence {
  SequenceType type = SequenceType::kList;
  std::span<const Value> items;
  mutable bool consumed = false;          // generators can be iterated only once
  int64_t start = 0, stop = 0, step = 1;  // of a range
};

struct Dict {
  struct Entry {
    Value key, value;
  };
  std::span<const Entry> entries;  // in insertion order, keys unique
  const std::pmr::unordered_map<std::string_view, size_t>* text_keys = nullptr;  // only for large dicts
};

class DictBuilder {
 public:
  explicit DictBuilder(Heap& heap) : heap_(heap) {}
  void set(const Value& key, const Value& value);  // the last value wins; the key keeps its first position
  bool add(const Value& key);                      // adds a key without a value; false if it exists
  const Dict* finish();

 private:
  // Returns the entry for `key`, inserted if absent, and whether it was inserted.
  std::pair<Dict::Entry*, bool> place(const Value& key);

  Heap& heap_;
  std::vector<Dict::Entry> entries_;
  std::unordered_map<std::string_view, size_t> text_keys_;
};

struct Namespace {
  explicit Namespace(Heap& heap) : members(heap.memory()) {}
  std::pmr::map<std::string_view, Value> members;
};

// Constructors.
inline Value text_value(std::string_view bytes, bool safe = false) { return Value(Text{bytes, safe}); }
inline Value heap_text(Heap& heap, std::string_view bytes, bool safe = false) {
  return text_value(heap.text(bytes), safe);
}
Value sequence_value(Heap& heap, SequenceType type, const std::vector<Value>& items);
inline Value list_value(Heap& heap, const std::vector<Value>& items) {
  return sequence_value(heap, SequenceType::kList, items);
}
inline Value generator_value(Heap& heap, const std::vector<Value>& items) {
  return sequence_value(heap, SequenceType::kGenerator, items);
}
Value missing_variable(Heap& heap, std::string_view name);
Value missing_member(Heap& heap, const Value& owner, const Value& name);
Value forbidden_member(Heap& heap, const Value& owner, std::string_view name);

// Returns Python's type name ("str", "dict", ...), or Jinja's for its own types ("Markup", "Undefined", ...).
std::string_view type_name(const Value& value);
// Throws an Error with the message of Jinja's UndefinedError.
[[noreturn]] void fail_undefined(const Undefined& value);
// Throws if `value` is undefined: for operations that Undefined does not support.
void require_defined(const Value& value);

bool truth(const Value& value);
bool equal(Heap& heap, const Value& a, const Value& b);
// Returns -1, 0 or 1; throws an Error with Python's TypeError message if Python cannot order the values.
int compare(Heap& heap, const Value& a, const Value& b, std::string_view op = "<");
bool contains(Heap& heap, const Value& container, const Value& item);
const Value* find(Heap& heap, const Dict& dict, const Value& key);

// Returns the items of a value; throws for values that Python cannot iterate. Consumes a generator.
std::vector<Value> iterate(Heap& heap, const Value& value);
int64_t length(Heap& heap, const Value& value);

std::string to_text(Heap& heap, const Value& value);  // str()
std::string to_repr(Heap& heap, const Value& value);  // repr()
std::string float_repr(double value);
double to_double(const Value& number);                        // for a bool, int or float
int64_t to_index(const Value& value, std::string_view what);  // throws an error naming `what` if not int
// Returns the text of a str argument; for other types, throws an error naming `what`.
std::string_view require_text(const Value& value, std::string_view what);

}  // namespace fp4moe::jinja
