// Reads JSON (messages, tools) and writes it (the tojson filter).
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

#include "io/jinja/builtins.h"
#include "io/jinja/text.h"

namespace fp4moe::jinja {

namespace {

// Builds values from nlohmann's SAX events; keeps the order of keys, and the last of duplicate keys.
class ValueBuilder {
 public:
  ValueBuilder(Heap& heap, std::string_view what) : heap_(heap), what_(what) {}

  bool null() { return add(Value(None{})); }
  bool boolean(bool value) { return add(Value(value)); }
  bool number_integer(int64_t value) { return add(Value(value)); }
  bool number_unsigned(uint64_t value) {
    if (value > static_cast<uint64_t>(INT64_MAX)) fail_integer(std::to_string(value));
    return add(Value(static_cast<int64_t>(value)));
  }
  bool number_float(double value, const std::string& written) {
    if (written.find_first_of(".eE") == std::string::npos) fail_integer(written);
    return add(Value(value));
  }
  bool string(std::string& value) { return add(heap_text(heap_, value)); }
  bool binary(std::vector<uint8_t>&) { return false; }
  bool key(std::string& value) {
    open_.back().key = heap_text(heap_, value);
    return true;
  }
  bool start_object(size_t) { return open(true); }
  bool start_array(size_t) { return open(false); }
  bool end_object() {
    const Value value(open_.back().members.finish());
    open_.pop_back();
    return add(value);
  }
  bool end_array() {
    const Value value = list_value(heap_, open_.back().items);
    open_.pop_back();
    return add(value);
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    fail(std::string(what_) + " is not valid JSON at byte " + std::to_string(position));
  }

  const Value& result() const { return result_; }

 private:
  struct Open {
    bool is_object;
    DictBuilder members;
    std::vector<Value> items;
    Value key;
  };

  [[noreturn]] void fail_integer(const std::string& written) const {
    fail(std::string(what_) + ": integer " + written.substr(0, 40) + " does not fit in 64 bits");
  }
  bool open(bool is_object) {
    if (open_.size() >= static_cast<size_t>(heap_.limits().depth / 4))
      limit(std::string(what_) + " nests more than " + std::to_string(heap_.limits().depth / 4) +
            " levels deep");
    open_.push_back({is_object, DictBuilder(heap_), {}, {}});
    return true;
  }
  bool add(const Value& value) {
    if (open_.empty()) {
      result_ = value;
    } else if (open_.back().is_object) {
      open_.back().members.set(open_.back().key, value);
    } else {
      heap_.checked_bytes(open_.back().items.size() + 1, sizeof(Value));
      open_.back().items.push_back(value);
    }
    return true;
  }

  Heap& heap_;
  std::string_view what_;
  std::vector<Open> open_;
  Value result_;
};

class JsonWriter {
 public:
  JsonWriter(Heap& heap, const JsonStyle& style) : heap_(heap), style_(style) {}

  void write(const Value& value) {
    const Heap::Level level(heap_);
    heap_.step();
    heap_.checked_bytes(out.size(), 1);
    if (const Text* text = value.as<Text>()) return write_text(text->bytes);
    if (const Dict* dict = value.dict()) return write_dict(*dict);
    const Sequence* s = value.sequence();
    if (s != nullptr && s->type <= SequenceType::kGroup) return write_list(*s);
    if (!value.is<None>() && !value.is_number())
      fail("Object of type " + std::string(type_name(value)) + " is not JSON serializable");
    out += scalar(value);
  }

  std::string out;

 private:
  static std::string scalar(const Value& value) {
    if (value.is<None>()) return "null";
    if (const bool* b = value.as<bool>()) return *b ? "true" : "false";
    if (const int64_t* i = value.as<int64_t>()) return std::to_string(*i);
    const double d = *value.as<double>();
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d < 0 ? "-Infinity" : "Infinity";
    return float_repr(d);
  }

  void new_line() {
    if (!style_.pretty) return;
    out += '\n';
    for (int i = 0; i < depth_; ++i) out += style_.indent;
  }

  void write_list(const Sequence& s) {
    if (s.items.empty()) {
      out += "[]";
      return;
    }
    out += '[';
    ++depth_;
    for (size_t i = 0; i < s.items.size(); ++i) {
      if (i > 0) out += style_.item_separator;
      new_line();
      write(s.items[i]);
    }
    --depth_;
    new_line();
    out += ']';
  }

  void write_dict(const Dict& dict) {
    if (dict.entries.empty()) {
      out += "{}";
      return;
    }
    std::vector<Dict::Entry> entries(dict.entries.begin(), dict.entries.end());
    if (style_.sort_keys)
      std::stable_sort(entries.begin(), entries.end(),
                       [&](const auto& a, const auto& b) { return compare(heap_, a.key, b.key) < 0; });
    out += '{';
    ++depth_;
    bool first = true;
    for (const auto& [key, value] : entries) {
      if (!first) out += style_.item_separator;
      first = false;
      new_line();
      if (!key.is<Text>() && !key.is<None>() && !key.is_number())
        fail("keys must be str, int, float, bool or None, not " + std::string(type_name(key)));
      write_text(key.is<Text>() ? key.as<Text>()->bytes : std::string_view(scalar(key)));
      out += style_.key_separator;
      write(value);
    }
    --depth_;
    new_line();
    out += '}';
  }

  void write_escape(uint32_t unit) {
    char escape[12];
    std::snprintf(escape, sizeof escape, "\\u%04x", unit);
    out += escape;
  }

  void write_text(std::string_view text) {
    heap_.scan(text.size());
    out += '"';
    for (size_t at = 0; at < text.size();) {
      const char32_t point = next_point(text, at);
      static constexpr std::string_view kFrom = "\"\\\n\r\t\b\f", kTo = "\"\\nrtbf";
      const size_t i = point < 0x80 ? kFrom.find(static_cast<char>(point)) : std::string_view::npos;
      if (i != std::string_view::npos) {
        out += '\\';
        out += kTo[i];
      } else if (point < 0x20 || (style_.ensure_ascii && point >= 0x7F && point < 0x10000 && point != 0x7F)) {
        write_escape(point);
      } else if (style_.ensure_ascii && point >= 0x10000) {
        write_escape(0xD800 + ((point - 0x10000) >> 10));
        write_escape(0xDC00 + ((point - 0x10000) & 0x3FF));
      } else {
        append_utf8(out, point);
      }
    }
    out += '"';
  }

  Heap& heap_;
  const JsonStyle& style_;
  int depth_ = 0;
};

}  // namespace

std::string to_json(Heap& heap, const Value& value, const JsonStyle& style) {
  JsonWriter writer(heap, style);
  writer.write(value);
  return std::move(writer.out);
}

Value from_json(Heap& heap, std::string_view json, std::string_view what) {
  ValueBuilder builder(heap, what);
  nlohmann::json::sax_parse(json, &builder);
  return builder.result();
}

}  // namespace fp4moe::jinja
