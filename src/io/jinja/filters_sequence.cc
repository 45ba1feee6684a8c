// Filters on whole sequences: order, ends, parts, sums.
#include <algorithm>

#include "io/jinja/builtins.h"
#include "io/jinja/interpreter.h"
#include "io/jinja/selection.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

std::vector<Value> items_of(Call& call) { return iterate(call.heap, call.self); }

Value first(Call& call) {
  const std::vector<Value> items = items_of(call);
  return items.empty() ? missing_variable(call.heap, "the first item of an empty sequence") : items.front();
}

Value last(Call& call) {
  if (const Sequence* s = call.self.sequence(); s != nullptr && s->type == SequenceType::kGenerator)
    fail("'generator' object is not reversible");
  const std::vector<Value> items = items_of(call);
  return items.empty() ? missing_variable(call.heap, "the last item of an empty sequence") : items.back();
}

Value reverse(Call& call) {
  if (call.self.is<Text>()) {
    const Value step(int64_t{-1});
    return slice(call.heap, call.self, {nullptr, nullptr, &step});
  }
  std::vector<Value> items = items_of(call);
  std::reverse(items.begin(), items.end());
  return generator_value(call.heap, items);
}

Value join(Call& call) {
  const std::string separator = call.has(0) ? to_text(call.heap, call.arg(0)) : "";
  const AttributePath path(call, 1);
  std::string out;
  bool is_first = true;
  for (const Value& item : items_of(call)) {
    if (!is_first) out += separator;
    is_first = false;
    out += to_text(call.heap, path.of(item));
    call.heap.checked_bytes(out.size(), 1);
  }
  return heap_text(call.heap, out);
}

// Returns the key for Python's sort order; for text, it is case-insensitive unless case_sensitive is true.
Value sort_key(Call& call, const Value& value, bool case_sensitive) {
  if (case_sensitive || !value.is<Text>()) return value;
  return heap_text(call.heap, to_lower(value.as<Text>()->bytes));
}

struct Keyed {
  Value key, item;
};

void sort_keyed(Call& call, std::vector<Keyed>& keyed, bool is_reverse) {
  // Python keeps the order of equal items, even when it sorts in reverse.
  std::stable_sort(keyed.begin(), keyed.end(), [&](const Keyed& a, const Keyed& b) {
    return is_reverse ? compare(call.heap, b.key, a.key) < 0 : compare(call.heap, a.key, b.key) < 0;
  });
}

std::vector<Value> items_in_order(const std::vector<Keyed>& keyed) {
  std::vector<Value> items;
  for (const Keyed& k : keyed) items.push_back(k.item);
  return items;
}

// sort(reverse, case_sensitive, attribute); attribute may list several, separated by commas.
Value sort(Call& call) {
  std::vector<AttributePath> paths;
  if (call.has(2) && call.arg(2).is<Text>()) {
    for (const std::string_view part : split(call.arg(2).as<Text>()->bytes, ",", -1, false))
      paths.emplace_back(call, text_value(part));
  } else {
    paths.emplace_back(call, 2);
  }
  std::vector<Keyed> keyed;
  for (const Value& item : items_of(call)) {
    std::vector<Value> keys;
    for (const AttributePath& path : paths)
      keys.push_back(sort_key(call, path.of(item), call.truth_or(1, false)));
    keyed.push_back({list_value(call.heap, keys), item});
  }
  sort_keyed(call, keyed, call.truth_or(0, false));
  return list_value(call.heap, items_in_order(keyed));
}

const Dict& require_dict(const Value& value) {
  require_defined(value);
  if (value.dict() == nullptr) fail("a mapping is required, not '" + std::string(type_name(value)) + "'");
  return *value.dict();
}

// dictsort(case_sensitive, by, reverse)
Value dictsort(Call& call) {
  const std::string_view by = call.has(1) ? require_text(call.arg(1), "by") : std::string_view("key");
  if (by != "key" && by != "value") fail("You can only sort by either \"key\" or \"value\"");
  std::vector<Keyed> keyed;
  for (const auto& [key, value] : require_dict(call.self).entries)
    keyed.push_back({sort_key(call, by == "key" ? key : value, call.truth_or(0, false)),
                     sequence_value(call.heap, SequenceType::kTuple, {key, value})});
  sort_keyed(call, keyed, call.truth_or(2, false));
  return list_value(call.heap, items_in_order(keyed));
}

Value items(Call& call) {
  if (call.self.is<Undefined>()) return generator_value(call.heap, {});
  if (call.self.dict() == nullptr) fail("Can only get item pairs from a mapping.");
  std::vector<Value> pairs;
  for (const auto& [key, value] : call.self.dict()->entries)
    pairs.push_back(sequence_value(call.heap, SequenceType::kTuple, {key, value}));
  return generator_value(call.heap, pairs);
}

// unique(case_sensitive, attribute)
Value unique(Call& call) {
  const AttributePath path(call, 1);
  DictBuilder seen(call.heap);
  std::vector<Value> kept;
  for (const Value& item : items_of(call)) {
    if (seen.add(sort_key(call, path.of(item), call.truth_or(0, false)))) kept.push_back(item);
  }
  return generator_value(call.heap, kept);
}

// min and max(case_sensitive, attribute); return the first of equal items.
template <int kWanted>
Value extreme(Call& call) {
  const AttributePath path(call, 1);
  Value best, best_key;
  bool found = false;
  for (const Value& item : items_of(call)) {
    const Value key = sort_key(call, path.of(item), call.truth_or(0, false));
    if (found && compare(call.heap, key, best_key) != kWanted) continue;
    best = item;
    best_key = key;
    found = true;
  }
  return found ? best : missing_variable(call.heap, "the extreme item of an empty sequence");
}

// sum(attribute, start)
Value sum(Call& call) {
  const AttributePath path(call, 0);
  Value total = call.arg_or(1, Value(int64_t{0}));
  if (total.is<Text>()) fail("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& item : items_of(call)) total = binary(call.heap, "+", total, path.of(item));
  return total;
}

// groupby(attribute, default, case_sensitive)
Value groupby(Call& call) {
  const AttributePath path(call, 0, call.has(1) && !call.arg(1).is<None>() ? &call.arg(1) : nullptr);
  std::vector<Keyed> keyed;
  for (const Value& item : items_of(call))
    keyed.push_back({sort_key(call, path.of(item), call.truth_or(2, false)), item});
  sort_keyed(call, keyed, false);
  std::vector<Value> groups;
  for (size_t begin = 0; begin < keyed.size();) {
    std::vector<Value> members;
    size_t end = begin;
    for (; end < keyed.size() && equal(call.heap, keyed[end].key, keyed[begin].key); ++end)
      members.push_back(keyed[end].item);
    groups.push_back(sequence_value(call.heap, SequenceType::kGroup,
                                    {path.of(members[0]), list_value(call.heap, members)}));
    begin = std::max(end, begin + 1);
  }
  return list_value(call.heap, groups);
}

// batch(linecount, fill_with)
Value batch(Call& call) {
  const int64_t size = call.int_or(0, 0);
  std::vector<Value> batches, row;
  for (const Value& item : items_of(call)) {
    if (static_cast<int64_t>(row.size()) == size) {
      batches.push_back(list_value(call.heap, row));
      row.clear();
    }
    row.push_back(item);
  }
  if (!row.empty()) {
    const bool fill = call.has(1) && !call.arg(1).is<None>();
    if (fill)
      call.heap.step(call.heap.checked_bytes(static_cast<size_t>(std::max<int64_t>(size, 0)), sizeof(Value)) /
                     sizeof(Value));
    while (fill && static_cast<int64_t>(row.size()) < size) row.push_back(call.arg(1));
    batches.push_back(list_value(call.heap, row));
  }
  return generator_value(call.heap, batches);
}

// slice(slices, fill_with)
Value slice_filter(Call& call) {
  const std::vector<Value> all = items_of(call);
  const int64_t slices = call.int_or(0, 0), size = static_cast<int64_t>(all.size());
  if (slices == 0) fail("integer division or modulo by zero");
  std::vector<Value> columns;
  const auto* at = all.data();
  for (int64_t i = 0; i < slices; ++i) {
    call.heap.step();
    std::vector<Value> column(at, at + size / slices + (i < size % slices ? 1 : 0));
    at += column.size();
    if (call.has(1) && !call.arg(1).is<None>() && i >= size % slices) column.push_back(call.arg(1));
    columns.push_back(list_value(call.heap, column));
  }
  return generator_value(call.heap, columns);
}

Value length_filter(Call& call) { return Value(length(call.heap, call.self)); }

constexpr Builtin kSequenceFilters[] = {
    {"length", "", 0, length_filter},
    {"count", "", 0, length_filter},
    {"list", "", 0, [](Call& c) { return list_value(c.heap, items_of(c)); }},
    {"first", "", 0, first},
    {"last", "", 0, last},
    {"reverse", "", 0, reverse},
    {"join", "d attribute", 0, join},
    {"sort", "reverse case_sensitive attribute", 0, sort},
    {"dictsort", "case_sensitive by reverse", 0, dictsort},
    {"items", "", 0, items},
    {"unique", "case_sensitive attribute", 0, unique},
    {"min", "case_sensitive attribute", 0, extreme<-1>},
    {"max", "case_sensitive attribute", 0, extreme<1>},
    {"sum", "attribute start", 0, sum},
    {"groupby", "attribute default case_sensitive", 1, groupby},
    {"batch", "linecount fill_with", 1, batch},
    {"slice", "slices fill_with", 1, slice_filter},
};

}  // namespace

std::span<const Builtin> sequence_filters() { return kSequenceFilters; }

}  // namespace fp4moe::jinja
