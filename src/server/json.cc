#include "server/json.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace fp4moe {

namespace {

constexpr size_t kMaxDepth = 64;  // nlohmann's printer recurses
constexpr int64_t kMaxKeys = 4096;
// Limit on the sum of squared key counts of all objects: an ordered object finds keys linearly, so reading it
// takes keys^2 comparisons.
constexpr int64_t kMaxSquaredKeys = int64_t{1} << 26;
constexpr int64_t kMaxJsonBytes = int64_t{128} << 20;
// Memory per value, in an array that has just doubled its capacity, and extra memory per string, array or
// object.
constexpr int64_t kValueBytes = 2 * sizeof(json), kHeapBytes = 80;
constexpr size_t kMaxQuoted = 80;  // characters of a wrong value shown in an error

std::string format(double value) {
  std::string text = json(value).dump();
  if (text.size() > 2 && text.compare(text.size() - 2, 2, ".0") == 0) text.resize(text.size() - 2);
  return text;
}

}  // namespace

// Does not check that the text is valid JSON; the parser does.
Result<int64_t> parsed_json_bytes(std::string_view text) {
  std::vector<int64_t> keys;  // number of colons in each open bracket
  int64_t num_values = 1, num_on_heap = 0, squared_keys = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
      ++num_on_heap;
    } else if (c == '{' || c == '[') {
      keys.push_back(0);
      ++num_values;
      ++num_on_heap;
      if (keys.size() > kMaxDepth)
        return invalid_argument("JSON nests deeper than " + std::to_string(kMaxDepth) + " levels");
    } else if ((c == '}' || c == ']') && !keys.empty()) {
      squared_keys += keys.back() * keys.back();
      keys.pop_back();
    } else if (c == ',') {
      ++num_values;
    } else if (c == ':' && !keys.empty() && ++keys.back() > kMaxKeys) {
      return invalid_argument("a JSON object has more than " + std::to_string(kMaxKeys) + " keys");
    }
  }
  const int64_t bytes = kValueBytes * num_values + kHeapBytes * num_on_heap + std::ssize(text);
  if (squared_keys > kMaxSquaredKeys)
    return invalid_argument(
        "the JSON has too many objects with many keys: the squares of their key counts add "
        "up to " +
        std::to_string(squared_keys) + "; the limit is " + std::to_string(kMaxSquaredKeys));
  if (bytes > kMaxJsonBytes)
    return invalid_argument("the JSON takes up to " + std::to_string(bytes) +
                            " bytes of memory; the limit is " + std::to_string(kMaxJsonBytes));
  return bytes;
}

Result<json> parse_json(std::string_view text) {
  if (const Result<int64_t> bytes = parsed_json_bytes(text); !bytes.ok()) return bytes.status();
  try {
    return json::parse(text);
  } catch (const json::exception& error) {
    const std::string what = error.what();  // "[json.exception.parse_error.101] parse error at line ..."
    return invalid_argument("the body is not valid JSON: " + what.substr(what.find(']') + 2));
  }
}

std::string to_text(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

std::string shown(const json& value) { return to_text(value).substr(0, kMaxQuoted); }

Fields::Fields(const json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {
  if (!object_.is_object()) {
    if (!prefix_.empty()) param_ = prefix_.substr(0, prefix_.size() - 1);
    error_ = invalid_argument((param_.empty() ? "the body" : param_) + " must be a JSON object, not " +
                              object_.type_name());
    cause_ = error_;
  }
}

const json* Fields::find(const std::string& name) { return find_as(name, FieldNote::Kind::kAny); }

const json* Fields::find_as(const std::string& name, FieldNote::Kind kind) {
  notes_.push_back({prefix_ + name, kind});
  if (!object_.is_object()) return nullptr;
  const auto at = object_.find(name);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

void Fields::fail(const std::string& name, std::string message) {
  fail(name, invalid_argument(std::move(message)));
}

void Fields::fail(const std::string& name, const Status& status) {
  if (!error_.ok()) return;
  param_ = prefix_ + name;
  cause_ = status;
  error_ = param_.empty() ? status : status.with_context(param_);
}

void Fields::merge(const Fields& inner) {
  notes_.insert(notes_.end(), inner.notes_.begin(), inner.notes_.end());
  for (std::string& name : inner.unknown()) unknown_inside_.push_back(std::move(name));
  merge_error(inner);
}

void Fields::merge_error(const Fields& inner) {
  if (!error_.ok()) return;
  error_ = inner.error_;
  cause_ = inner.cause_;
  param_ = inner.param_;
}

void Fields::merge_translated(const Fields& inner,
                              const std::function<std::string(const std::string& name)>& rename) {
  for (FieldNote note : inner.notes_) {
    note.name = rename(note.name);
    if (!note.name.empty()) notes_.push_back(std::move(note));
  }
  for (const std::string& name : inner.unknown_inside_)
    if (std::string own = rename(name); !own.empty()) unknown_inside_.push_back(std::move(own));
  if (!error_.ok() || inner.ok()) return;
  param_ = rename(inner.param_);
  cause_ = inner.cause_;
  error_ = param_.empty() ? cause_ : cause_.with_context(param_);
}

void Fields::wrong_type(const std::string& name, const char* wanted, const json& value) {
  fail(name, "must be " + std::string(wanted) + ", got " + value.type_name() + " " + shown(value));
}

bool Fields::boolean(const std::string& name, bool otherwise) {
  const json* value = find_as(name, FieldNote::Kind::kBoolean);
  if (value == nullptr) return otherwise;
  if (value->is_boolean()) return value->get<bool>();
  wrong_type(name, "a boolean", *value);
  return otherwise;
}

int64_t Fields::integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most) {
  const json* value = find_as(name, FieldNote::Kind::kInteger);
  notes_.back().least = static_cast<double>(least);
  notes_.back().most = static_cast<double>(most);
  if (value == nullptr) return otherwise;
  // Accepts 3.0 as 3; unsigned values beyond int64 are outside any range.
  const bool whole = value->is_number_float() && value->get<double>() >= -9e15 &&
                     value->get<double>() <= 9e15 &&
                     value->get<double>() == static_cast<double>(static_cast<int64_t>(value->get<double>()));
  if (!value->is_number_integer() && !whole) {
    wrong_type(name, "an integer", *value);
    return otherwise;
  }
  const bool huge = value->is_number_unsigned() &&
                    value->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const int64_t got = whole ? static_cast<int64_t>(value->get<double>()) : value->get<int64_t>();
  if (!huge && got >= least && got <= most) return got;
  fail(name,
       "must be in " + std::to_string(least) + ".." + std::to_string(most) + ", got " + to_text(*value));
  return otherwise;
}

double Fields::number(const std::string& name, double otherwise, double least, double most, bool open_least) {
  const json* value = find_as(name, FieldNote::Kind::kNumber);
  notes_.back().least = least;
  notes_.back().most = most;
  notes_.back().open_least = open_least;
  if (value == nullptr) return otherwise;
  if (!value->is_number()) {
    wrong_type(name, "a number", *value);
    return otherwise;
  }
  const double got = value->get<double>();
  if (got <= most && (open_least ? got > least : got >= least)) return got;
  fail(name, "must be in " + std::string(open_least ? "(" : "[") + format(least) + ", " + format(most) +
                 "], got " + to_text(*value));
  return otherwise;
}

std::string Fields::string(const std::string& name, const std::string& otherwise) {
  const json* value = find_as(name, FieldNote::Kind::kString);
  if (value == nullptr) return otherwise;
  if (value->is_string()) return value->get<std::string>();
  wrong_type(name, "a string", *value);
  return otherwise;
}

std::vector<std::string> Fields::strings(const std::string& name) {
  const json* value = find_as(name, FieldNote::Kind::kStrings);
  if (value == nullptr) return {};
  if (value->is_string()) return {value->get<std::string>()};
  const auto is_string = [](const json& v) { return v.is_string(); };
  if (value->is_array() && std::all_of(value->begin(), value->end(), is_string))
    return value->get<std::vector<std::string>>();
  wrong_type(name, "a string or an array of strings", *value);
  return {};
}

std::vector<int32_t> Fields::ids(const std::string& name) {
  const json* value = find_as(name, FieldNote::Kind::kIds);
  if (value == nullptr) return {};
  const auto is_id = [](const json& v) {
    return v.is_number_unsigned() && v.get<uint64_t>() <= std::numeric_limits<int32_t>::max();
  };
  if (is_id(*value)) return {value->get<int32_t>()};
  if (value->is_array() && std::all_of(value->begin(), value->end(), is_id))
    return value->get<std::vector<int32_t>>();
  wrong_type(name, "a token id or an array of token ids", *value);
  return {};
}

void Fields::refuse(const std::string& name, const json& neutral) {
  const json* value = find(name);
  if (value == nullptr || *value == neutral) return;
  fail(name, unsupported("is not supported by this server: omit it or send " + to_text(neutral) + ", got " +
                         shown(*value)));
}

std::vector<std::string> Fields::unknown() const {
  std::vector<std::string> names = unknown_inside_;
  if (!object_.is_object()) return names;
  std::unordered_set<std::string_view> known;
  for (const FieldNote& note : notes_) known.insert(note.name);
  for (const auto& item : object_.items())
    if (std::string name = prefix_ + item.key(); !known.contains(name)) names.push_back(std::move(name));
  return names;
}

}  // namespace fp4moe
