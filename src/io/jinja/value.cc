#include "io/jinja/value.h"

#include <charconv>
#include <cmath>

#include "io/jinja/callable.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

constexpr size_t kLinearDict = 8;  // dicts up to this size are searched linearly

bool same_text(const Value& a, const Value& b) {
  const Text *x = a.as<Text>(), *y = b.as<Text>();
  return x != nullptr && y != nullptr && x->bytes == y->bytes;
}

bool is_ordered_sequence(const Sequence& s) {
  return s.type == SequenceType::kList || s.type == SequenceType::kTuple || s.type == SequenceType::kGroup;
}

// Whether two sequences can be equal: lists with lists, tuples (which include groups) with tuples.
bool comparable(const Sequence& a, const Sequence& b) {
  return is_ordered_sequence(a) && is_ordered_sequence(b) &&
         (a.type == SequenceType::kList) == (b.type == SequenceType::kList);
}

bool equal_items(Heap& heap, std::span<const Value> a, std::span<const Value> b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!equal(heap, a[i], b[i])) return false;
  return true;
}

bool equal_dicts(Heap& heap, const Dict& a, const Dict& b) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    const Value* other = find(heap, b, key);
    if (other == nullptr || !equal(heap, value, *other)) return false;
  }
  return true;
}

void append_items(Heap& heap, std::string& out, std::span<const Value> items) {
  const char* comma = "";
  for (const Value& item : items) {
    out += comma;
    out += to_repr(heap, item);
    heap.checked_bytes(out.size(), 1);
    comma = ", ";
  }
}

std::string sequence_repr(Heap& heap, const Sequence& s) {
  const Heap::Level level(heap);
  std::string out;
  switch (s.type) {
    case SequenceType::kGenerator:
      return "<generator object>";
    case SequenceType::kRange: {
      out = "range(" + std::to_string(s.start) + ", " + std::to_string(s.stop);
      return out + (s.step == 1 ? ")" : ", " + std::to_string(s.step) + ")");
    }
    case SequenceType::kList:
      out = "[";
      break;
    case SequenceType::kTuple:
    case SequenceType::kGroup:
      out = "(";
      break;
    default:
      out = std::string(type_name(Value(&s))) + "([";
  }
  append_items(heap, out, s.items);
  if (s.type == SequenceType::kList) return out + "]";
  if (s.type == SequenceType::kTuple || s.type == SequenceType::kGroup)
    return out + (s.items.size() == 1 ? ",)" : ")");
  return out + "])";
}

std::string dict_repr(Heap& heap, const Dict& dict) {
  const Heap::Level level(heap);
  std::string out = "{";
  for (const auto& [key, value] : dict.entries) {
    if (out.size() > 1) out += ", ";
    out += to_repr(heap, key) + ": " + to_repr(heap, value);
    heap.checked_bytes(out.size(), 1);
  }
  return out + "}";
}

void require_hashable(const Value& key) {
  const Sequence* s = key.sequence();
  const bool hashable = s != nullptr && (s->type == SequenceType::kTuple || s->type == SequenceType::kGroup ||
                                         s->type == SequenceType::kRange);
  if (key.dict() != nullptr || (s != nullptr && !hashable))
    fail("unhashable type: '" + std::string(type_name(key)) + "'");
}

}  // namespace

Value sequence_value(Heap& heap, SequenceType type, const std::vector<Value>& items) {
  return Value(static_cast<const Sequence*>(heap.make<Sequence>(type, heap.items(items))));
}

Value missing_variable(Heap& heap, std::string_view name) {
  return Value(Undefined{heap.make<MissingName>(std::string_view(), name)});
}

Value missing_member(Heap& heap, const Value& owner, const Value& name) {
  return Value(
      Undefined{heap.make<MissingName>(type_name(owner), heap.text(to_repr(heap, name)), !name.is<Text>())});
}

Value forbidden_member(Heap& heap, const Value& owner, std::string_view name) {
  return Value(Undefined{heap.make<MissingName>(type_name(owner), heap.text(quoted(name)), false, true)});
}

std::pair<Dict::Entry*, bool> DictBuilder::place(const Value& key) {
  require_hashable(key);
  heap_.step();
  if (const Text* text = key.as<Text>()) {
    const auto [known, is_new] = text_keys_.emplace(text->bytes, entries_.size());
    if (!is_new) return {&entries_[known->second], false};
  } else {
    for (Dict::Entry& entry : entries_)
      if (equal(heap_, entry.key, key)) return {&entry, false};
  }
  heap_.checked_bytes(entries_.size() + 1, sizeof(Dict::Entry));
  entries_.push_back({key, Value()});
  return {&entries_.back(), true};
}

void DictBuilder::set(const Value& key, const Value& value) { place(key).first->value = value; }
bool DictBuilder::add(const Value& key) { return place(key).second; }

const Dict* DictBuilder::finish() {
  using Keys = std::pmr::unordered_map<std::string_view, size_t>;
  const Keys* keys = nullptr;
  if (entries_.size() > kLinearDict)
    keys = new (heap_.memory()->allocate(sizeof(Keys), alignof(Keys)))
        Keys(text_keys_.begin(), text_keys_.end(), text_keys_.size(), heap_.memory());
  return heap_.make<Dict>(heap_.items(entries_), keys);
}

std::string_view type_name(const Value& value) {
  static constexpr std::string_view kNames[] = {"Undefined", "None", "bool",      "int", "float",      "str",
                                                "",          "dict", "Namespace", "",    "LoopContext"};
  static constexpr std::string_view kSequences[] = {"list",      "tuple",     "_GroupTuple", "range",
                                                    "generator", "dict_keys", "dict_values", "dict_items"};
  if (const Sequence* s = value.sequence()) return kSequences[static_cast<int>(s->type)];
  if (value.is<const Callable*>()) return callable_type_name(*std::get<const Callable*>(value));
  if (const Text* text = value.as<Text>(); text != nullptr && text->safe) return "Markup";
  return kNames[value.index()];
}

void fail_undefined(const Undefined& value) {
  const MissingName* missing = value.missing;
  if (missing == nullptr) fail("value is undefined");
  const std::string name(missing->name), owner(missing->owner);
  if (missing->forbidden) fail("access to attribute " + name + " of '" + owner + "' object is unsafe.");
  if (owner.empty()) fail("'" + name + "' is undefined");
  const std::string object = owner == "None" ? "'None'" : "'" + owner + " object'";
  if (!missing->element) fail(object + " has no attribute " + name);
  fail((owner == "None" ? owner : owner + " object") + " has no element " + name);
}

void require_defined(const Value& value) {
  if (const Undefined* undefined = value.as<Undefined>()) fail_undefined(*undefined);
}

bool truth(const Value& value) {
  if (value.is<Undefined>() || value.is<None>()) return false;
  if (const bool* b = value.as<bool>()) return *b;
  if (const int64_t* i = value.as<int64_t>()) return *i != 0;
  if (const double* d = value.as<double>()) return *d != 0;
  if (const Text* text = value.as<Text>()) return !text->bytes.empty();
  if (const Sequence* s = value.sequence()) return s->type == SequenceType::kGenerator || !s->items.empty();
  if (const Dict* dict = value.dict()) return !dict->entries.empty();
  return true;
}

double to_double(const Value& number) {
  if (const bool* b = number.as<bool>()) return *b ? 1 : 0;
  if (const int64_t* i = number.as<int64_t>()) return static_cast<double>(*i);
  return std::get<double>(number);
}

int64_t to_index(const Value& value, std::string_view what) {
  require_defined(value);
  if (const bool* b = value.as<bool>()) return *b ? 1 : 0;
  if (const int64_t* i = value.as<int64_t>()) return *i;
  fail(std::string(what) + " must be an integer, not '" + std::string(type_name(value)) + "'");
}

std::string_view require_text(const Value& value, std::string_view what) {
  require_defined(value);
  if (const Text* text = value.as<Text>()) return text->bytes;
  fail(std::string(what) + " must be str, not '" + std::string(type_name(value)) + "'");
}

namespace {

// Compares ints and floats by their exact values, like Python.
int compare_numbers(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) {
    const int64_t x = to_index(a, ""), y = to_index(b, "");
    return x < y ? -1 : x > y ? 1 : 0;
  }
  const long double x = a.is_integral() ? static_cast<long double>(to_index(a, "")) : std::get<double>(a);
  const long double y = b.is_integral() ? static_cast<long double>(to_index(b, "")) : std::get<double>(b);
  return x < y ? -1 : x > y ? 1 : 0;
}

bool is_nan(const Value& v) { return v.is<double>() && std::isnan(std::get<double>(v)); }

}  // namespace

bool equal(Heap& heap, const Value& a, const Value& b) {
  heap.step();
  if (a.is_number() && b.is_number()) return !is_nan(a) && !is_nan(b) && compare_numbers(a, b) == 0;
  if (a.index() != b.index()) return false;
  if (a.is<Undefined>() || a.is<None>()) return true;
  if (const Text* text = a.as<Text>()) {
    heap.scan(text->bytes.size());
    return same_text(a, b);
  }
  const Heap::Level level(heap);
  if (const Sequence* s = a.sequence()) {
    const Sequence* other = b.sequence();
    if (s == other) return true;
    const bool ranges = s->type == SequenceType::kRange && other->type == SequenceType::kRange;
    return (ranges || comparable(*s, *other)) && equal_items(heap, s->items, other->items);
  }
  if (const Dict* dict = a.dict()) return dict == b.dict() || equal_dicts(heap, *dict, *b.dict());
  if (a.is<Namespace*>()) return std::get<Namespace*>(a) == std::get<Namespace*>(b);
  if (a.is<Loop*>()) return std::get<Loop*>(a) == std::get<Loop*>(b);
  return same_callable(*std::get<const Callable*>(a), *std::get<const Callable*>(b));
}

int compare(Heap& heap, const Value& a, const Value& b, std::string_view op) {
  heap.step();
  require_defined(a);
  require_defined(b);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b);
  if (const Text* x = a.as<Text>(), *y = b.as<Text>(); x != nullptr && y != nullptr) {
    heap.scan(std::min(x->bytes.size(), y->bytes.size()));
    const int order = x->bytes.compare(y->bytes);  // UTF-8 sorts like code points
    return order < 0 ? -1 : order > 0 ? 1 : 0;
  }
  const Sequence *s = a.sequence(), *t = b.sequence();
  if (s == nullptr || t == nullptr || !comparable(*s, *t))
    fail("'" + std::string(op) + "' not supported between instances of '" + std::string(type_name(a)) +
         "' and '" + std::string(type_name(b)) + "'");
  const Heap::Level level(heap);
  for (size_t i = 0; i < s->items.size() && i < t->items.size(); ++i)
    if (!equal(heap, s->items[i], t->items[i])) return compare(heap, s->items[i], t->items[i], op);
  return s->items.size() < t->items.size() ? -1 : s->items.size() > t->items.size() ? 1 : 0;
}

const Value* find(Heap& heap, const Dict& dict, const Value& key) {
  require_hashable(key);
  if (const Text* text = key.as<Text>(); text != nullptr && dict.text_keys != nullptr) {
    const auto place = dict.text_keys->find(text->bytes);
    return place == dict.text_keys->end() ? nullptr : &dict.entries[place->second].value;
  }
  for (const Dict::Entry& entry : dict.entries)
    if (key.is<Text>() ? same_text(entry.key, key) : equal(heap, entry.key, key)) return &entry.value;
  return nullptr;
}

bool contains(Heap& heap, const Value& container, const Value& item) {
  if (const Text* text = container.as<Text>()) {
    heap.scan(text->bytes.size());
    const Text* part = item.as<Text>();
    if (part == nullptr)
      fail("'in <string>' requires string as left operand, not " + std::string(type_name(item)));
    return text->bytes.find(part->bytes) != std::string_view::npos;
  }
  if (const Dict* dict = container.dict()) return find(heap, *dict, item) != nullptr;
  for (const Value& element : iterate(heap, container))
    if (equal(heap, element, item)) return true;
  return false;
}

std::vector<Value> iterate(Heap& heap, const Value& value) {
  std::vector<Value> items;
  if (value.is<Undefined>()) return items;
  if (const Sequence* s = value.sequence()) {
    heap.scan(heap.checked_bytes(s->items.size(), sizeof(Value)));
    if (!s->consumed) items.assign(s->items.begin(), s->items.end());
    if (s->type == SequenceType::kGenerator) s->consumed = true;
  } else if (const Text* text = value.as<Text>()) {
    heap.step(text->bytes.size());
    heap.checked_bytes(text->bytes.size(), sizeof(Value));
    for (const std::string_view point : points(text->bytes)) items.push_back(text_value(point));
  } else if (const Dict* dict = value.dict()) {
    heap.scan(heap.checked_bytes(dict->entries.size(), sizeof(Value)));
    for (const Dict::Entry& entry : dict->entries) items.push_back(entry.key);
  } else {
    fail("'" + std::string(value.is<None>() ? "NoneType" : type_name(value)) + "' object is not iterable");
  }
  return items;
}

int64_t length(Heap& heap, const Value& value) {
  if (value.is<Undefined>()) return 0;
  if (const Text* text = value.as<Text>()) {
    heap.scan(text->bytes.size());
    return static_cast<int64_t>(num_points(text->bytes));
  }
  if (const Sequence* s = value.sequence(); s != nullptr && s->type != SequenceType::kGenerator)
    return static_cast<int64_t>(s->items.size());
  if (const Dict* dict = value.dict()) return static_cast<int64_t>(dict->entries.size());
  fail("object of type '" + std::string(value.is<None>() ? "NoneType" : type_name(value)) + "' has no len()");
}

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const double size = std::fabs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto format = plain ? std::chars_format::fixed : std::chars_format::scientific;
  std::string text(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, format).ptr);
  if (plain && text.find('.') == std::string::npos) text += ".0";
  return text;
}

std::string to_text(Heap& heap, const Value& value) {
  if (value.is<Undefined>()) return {};
  if (const Text* text = value.as<Text>()) return std::string(text->bytes);
  return to_repr(heap, value);
}

std::string to_repr(Heap& heap, const Value& value) {
  heap.step();
  if (value.is<Undefined>()) return "Undefined";
  if (value.is<None>()) return "None";
  if (const bool* b = value.as<bool>()) return *b ? "True" : "False";
  if (const int64_t* i = value.as<int64_t>()) return std::to_string(*i);
  if (const double* d = value.as<double>()) return float_repr(*d);
  if (const Text* text = value.as<Text>()) {
    heap.scan(heap.checked_bytes(text->bytes.size(), 1));
    return text->safe ? "Markup(" + quoted(text->bytes) + ")" : quoted(text->bytes);
  }
  if (const Sequence* s = value.sequence()) return sequence_repr(heap, *s);
  if (const Dict* dict = value.dict()) return dict_repr(heap, *dict);
  return "<" + std::string(type_name(value)) + " object>";
}

}  // namespace fp4moe::jinja
