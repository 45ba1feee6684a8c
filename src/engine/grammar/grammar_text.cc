#include "engine/grammar/grammar_text.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"

namespace fp4moe {
namespace {

using Json = nlohmann::json;
using Kind = GrammarSpec::Kind;

constexpr int kMaxNesting = 256;      // levels of brackets; parsers recurse
constexpr double kNotableSize = 100;  // estimated states that a part must add to be named
constexpr size_t kMaxQuoted = 60;     // bytes of client text in a message

// Printable and short: messages quote text that clients send.
std::string in_quotes(std::string_view text) {
  std::string result = "\"";
  for (const char c : text.substr(0, kMaxQuoted)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > kMaxQuoted ? "...\"" : "\"");
}

Status check_nesting(std::string_view text) {
  int depth = 0;
  for (const char c : text) {
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') depth = std::max(0, depth - 1);
    if (depth > kMaxNesting)
      return invalid_argument("the grammar nests deeper than " + std::to_string(kMaxNesting) + " brackets");
  }
  return {};
}

bool is_one_of(std::string_view key, std::initializer_list<std::string_view> keys) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// Calls visit(schema, JSON pointer) for a schema and every schema nested in it, until one returns an error.
using Visit = std::function<Status(const Json& schema, const std::string& pointer)>;
Status walk_schema(const Json& schema, const std::string& pointer, const Visit& visit) {
  if (!schema.is_object()) return {};
  FP4MOE_RETURN_IF_ERROR(visit(schema, pointer));
  for (const auto& [key, value] : schema.items()) {
    if (is_one_of(key, {"const", "default", "enum", "examples"})) continue;
    const std::string inner = pointer + "/" + key.substr(0, kMaxQuoted);
    const bool holds_schemas = is_one_of(key, {"properties", "patternProperties", "$defs", "definitions",
                                               "dependentSchemas", "anyOf", "oneOf", "allOf", "prefixItems"});
    if (!holds_schemas) FP4MOE_RETURN_IF_ERROR(walk_schema(value, inner, visit));
    if (!holds_schemas || !value.is_structured()) continue;
    for (const auto& [name, member] : value.items())
      FP4MOE_RETURN_IF_ERROR(walk_schema(member, inner + "/" + name.substr(0, kMaxQuoted), visit));
  }
  return {};
}

// Calls visit_schema for every value under the key "json_schema" of a structural tag, and visit_format for
// every object outside of these.
Status walk_tag(const Json& value, const std::string& pointer, const Visit& visit_schema,
                const Visit& visit_format) {
  if (!value.is_structured()) return {};
  if (value.is_object()) FP4MOE_RETURN_IF_ERROR(visit_format(value, pointer));
  for (const auto& [key, member] : value.items()) {
    const std::string inner = pointer + "/" + key.substr(0, kMaxQuoted);
    FP4MOE_RETURN_IF_ERROR(key == "json_schema" ? visit_schema(member, inner)
                                                : walk_tag(member, inner, visit_schema, visit_format));
  }
  return {};
}

std::string place(const std::string& pointer) {
  return pointer.empty() ? "the schema" : "the schema at " + in_quotes(pointer);
}

Status check_count(const Json& schema, const std::string& pointer, const char* key) {
  const auto count = schema.find(key);
  if (count == schema.end() || count->is_number_unsigned()) return {};
  return invalid_argument(std::string(key) + " " + in_quotes(count->dump()) + " of " + place(pointer) +
                          " must be an integer of at least 0");
}

Status check_order(const Json& schema, const std::string& pointer, const char* low_key, const char* high_key,
                   bool may_be_equal) {
  const auto low = schema.find(low_key), high = schema.find(high_key);
  if (low == schema.end() || high == schema.end() || !low->is_number() || !high->is_number()) return {};
  if (*low < *high || (may_be_equal && *low == *high)) return {};
  return invalid_argument(std::string(low_key) + " " + low->dump() + " of " + place(pointer) + " must be " +
                          (may_be_equal ? "at most " : "less than ") + high_key + " " + high->dump());
}

Status check_bounds(const Json& schema, const std::string& pointer) {
  for (const char* key : {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
                          "minContains", "maxContains"})
    FP4MOE_RETURN_IF_ERROR(check_count(schema, pointer, key));
  for (const char* key : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
    if (const auto bound = schema.find(key); bound != schema.end() && !bound->is_number())
      return invalid_argument(std::string(key) + " " + in_quotes(bound->dump()) + " of " + place(pointer) +
                              " must be a number");
  FP4MOE_RETURN_IF_ERROR(check_order(schema, pointer, "minLength", "maxLength", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, pointer, "minItems", "maxItems", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, pointer, "minProperties", "maxProperties", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, pointer, "minContains", "maxContains", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, pointer, "minimum", "maximum", true));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, pointer, "minimum", "exclusiveMaximum", false));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, pointer, "exclusiveMinimum", "maximum", false));
  FP4MOE_RETURN_IF_ERROR(check_order(schema, pointer, "exclusiveMinimum", "exclusiveMaximum", false));
  if (const auto step = schema.find("multipleOf"); step != schema.end() && *step <= 0)
    return invalid_argument("multipleOf " + step->dump() + " of " + place(pointer) + " must be above 0");
  return {};
}

// The schema's $ref, if it points into its own document; keywords next to the $ref are ignored.
std::optional<std::string> local_ref(const Json& schema) {
  if (!schema.is_object()) return {};
  const auto ref = schema.find("$ref");
  if (ref == schema.end() || !ref->is_string() || !ref->get_ref<const std::string&>().starts_with('#'))
    return {};
  return ref->get<std::string>();
}

// Refuses a chain of schemas that consist only of $refs and form a cycle: such a chain describes no value.
class RefCheck {
 public:
  explicit RefCheck(const Json& root) : root_(root) {}

  Status check(const Json& schema, const std::string& pointer) {
    std::set<std::string> seen;
    for (std::optional<std::string> ref = local_ref(schema); ref.has_value() && !followed_.contains(*ref);) {
      if (!seen.insert(*ref).second)
        return invalid_argument(
            "$ref " + in_quotes(*ref) + " of " + place(pointer) +
            " leads back to itself and describes no value; a schema that refers to itself "
            "needs another alternative");
      try {
        ref = local_ref(root_.at(Json::json_pointer(ref->substr(1))));
      } catch (const Json::exception&) {  // the target does not exist: the compiler reports it
        break;
      }
    }
    followed_.merge(seen);
    return {};
  }

 private:
  const Json& root_;
  std::set<std::string> followed_;  // refs whose chains end, so that each chain is followed once
};

Status check_schema(const Json& root) {
  RefCheck refs(root);
  return walk_schema(root, "", [&](const Json& schema, const std::string& pointer) {
    const Status bounds = check_bounds(schema, pointer);
    return bounds.ok() ? refs.check(schema, pointer) : bounds;
  });
}

// A part of a grammar, with an estimate of its automaton states.
struct Part {
  double size = kNotableSize;
  std::string text;
};

void consider(Part& costliest, double size, const std::function<std::string()>& text) {
  if (size > costliest.size) costliest = {size, text()};
}

// Finds counted repetitions in a regular expression or EBNF. The count of a nested repetition is multiplied
// by those of the repetitions around it.
class RepetitionScan {
 public:
  RepetitionScan(std::string_view text, bool is_ebnf) : text_(text), is_ebnf_(is_ebnf) {}

  void find(Part& costliest) {
    for (size_t i = 0; i < text_.size();) {
      const size_t begin = i;
      if (text_[i] == '{' && has_atom_) {
        i = repeat(i, costliest);
        continue;
      }
      has_atom_ = true;
      atom_ = {begin, 1, 0};
      if (text_[i] == '(') {
        groups_.push_back({begin, 1, 0});
        has_atom_ = false;
        ++i;
      } else if (text_[i] == ')' && !groups_.empty()) {
        atom_ = groups_.back();
        groups_.pop_back();
        keep_largest(atom_);
        ++i;
      } else {
        i = skip_atom(i);
      }
    }
  }

 private:
  struct Atom {
    size_t begin = 0;
    double product = 1;  // of the counts of nested repetitions
    int depth = 0;       // of their nesting
  };

  size_t skip_atom(size_t i) const {
    if (text_[i] == '\\') return std::min(i + 2, text_.size());
    const char close = text_[i] == '['               ? ']'
                       : is_ebnf_ && text_[i] == '"' ? '"'
                       : is_ebnf_ && text_[i] == '#' ? '\n'
                                                     : 0;
    if (close == 0) return i + 1;
    for (++i; i < text_.size() && text_[i] != close; ++i)
      if (text_[i] == '\\') ++i;
    return std::min(i + 1, text_.size());
  }

  // Handles "{m}", "{m,n}" or "{m,}" at i; returns its end.
  size_t repeat(size_t i, Part& costliest) {
    const size_t end = std::min(text_.find('}', i), text_.size() - 1) + 1;
    double count = 0, last = 0;
    for (const char c : text_.substr(i, end - i)) {
      if (std::isdigit(static_cast<unsigned char>(c)) != 0) last = std::min(last * 10 + (c - '0'), 1e9);
      if (c == ',' || c == '}') count = std::max(count, std::exchange(last, 0));
    }
    atom_.product *= std::max(count, 1.0);
    ++atom_.depth;
    keep_largest(atom_);
    consider(costliest, atom_.product, [&] {
      const std::string text = in_quotes(text_.substr(atom_.begin, end - atom_.begin));
      return atom_.depth > 1 ? "its repetition " + text +
                                   " contains counted repetitions; use lower counts, or do not nest them"
                             : "its repetition " + text + " has a large count; use a lower count, or none";
    });
    return end;
  }

  void keep_largest(const Atom& atom) {
    if (!groups_.empty() && atom.product > groups_.back().product)
      groups_.back() = {groups_.back().begin, atom.product, atom.depth};
  }

  std::string_view text_;
  bool is_ebnf_;
  bool has_atom_ = false;
  Atom atom_;                 // operand of the next repetition
  std::vector<Atom> groups_;  // open groups
};

void consider_schema(const Json& root, Part& costliest) {
  (void)walk_schema(root, "", [&](const Json& schema, const std::string& pointer) {
    if (const auto pattern = schema.find("pattern"); pattern != schema.end() && pattern->is_string())
      RepetitionScan(pattern->get_ref<const std::string&>(), false).find(costliest);
    if (const auto names = schema.find("properties"); names != schema.end() && names->is_object()) {
      const auto required = schema.find("required");
      const size_t num_required = required != schema.end() && required->is_array() ? required->size() : 0;
      const double num_optional = static_cast<double>(names->size()) - static_cast<double>(num_required);
      consider(costliest, std::max(num_optional * num_optional / 4, static_cast<double>(names->size())), [&] {
        return place(pointer) + " has " + std::to_string(names->size()) + " properties, of which " +
               std::to_string(num_required) + " are required; use fewer, or require more of them";
      });
    }
    for (const char* key : {"minLength", "maxLength", "minItems", "maxItems"})
      if (const auto count = schema.find(key); count != schema.end() && count->is_number_unsigned())
        consider(costliest, count->get<double>(), [&] {
          return std::string(key) + " " + count->dump() + " of " + place(pointer) +
                 " is large; use a lower value, or none";
        });
    return Status();
  });
}

void consider_tag(const Json& root, Part& costliest) {
  (void)walk_tag(
      root, "",
      [&](const Json& schema, const std::string&) {
        consider_schema(schema, costliest);
        return Status();
      },
      [&](const Json& format, const std::string&) {
        for (const char* key : {"pattern", "grammar"})
          if (const auto text = format.find(key); text != format.end() && text->is_string())
            RepetitionScan(text->get_ref<const std::string&>(), key[0] == 'g').find(costliest);
        return Status();
      });
}

Json parse(const std::string& text) { return Json::parse(text, nullptr, /*allow_exceptions=*/false); }

}  // namespace

Status check_grammar_text(const GrammarSpec& spec) {
  FP4MOE_RETURN_IF_ERROR(check_nesting(spec.text));
  if (spec.kind == Kind::kJsonSchema) return check_schema(parse(spec.text));
  if (spec.kind != Kind::kStructuralTag) return {};
  const auto ignore = [](const Json&, const std::string&) { return Status(); };
  const auto check = [](const Json& schema, const std::string&) { return check_schema(schema); };
  return walk_tag(parse(spec.text), "", check, ignore);
}

std::string costliest_part(const GrammarSpec& spec) {
  Part costliest;
  if (spec.kind == Kind::kRegex || spec.kind == Kind::kEbnf)
    RepetitionScan(spec.text, spec.kind == Kind::kEbnf).find(costliest);
  if (spec.kind == Kind::kJsonSchema) consider_schema(parse(spec.text), costliest);
  if (spec.kind == Kind::kStructuralTag) consider_tag(parse(spec.text), costliest);
  return costliest.text;
}

}  // namespace fp4moe
