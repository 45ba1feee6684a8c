#include "engine/grammar/grammar_text.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/grammar/json_schema.h"
#include "engine/grammar/schema_bounds.h"
#include "engine/grammar/schema_check.h"

namespace fp4moe {
namespace {

using Json = SchemaJson;
using Kind = GrammarSpec::Kind;

constexpr int kMaxNesting = 256;      // levels of brackets; parsers recurse
constexpr double kNotableSize = 100;  // estimated states that a part must add to be named

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

// Replaces every value under the key "json_schema" of a structural tag by replace(value, path), until one
// returns an error, and calls visit_format for every object outside of these, also until an error. Removes
// kSchemaPlace.
using Replace = std::function<Result<Json>(const Json& schema, const std::string& path)>;
using VisitFormat = std::function<Status(Json& format)>;
Status walk_tag(Json& value, const std::string& path, const Replace& replace,
                const VisitFormat& visit_format) {
  if (!value.is_structured()) return {};
  std::string place;
  if (value.is_object()) {
    if (const Json* given = member(value, GrammarSpec::kSchemaPlace); given != nullptr && given->is_string())
      place = given->get<std::string>();
    value.erase(GrammarSpec::kSchemaPlace);
    FP4MOE_RETURN_IF_ERROR(visit_format(value));
  }
  size_t index = 0;
  for (const auto& [key, inner] : value.items()) {
    const bool is_schema = value.is_object() && key == "json_schema";
    const std::string at = is_schema && !place.empty() ? place
                           : value.is_array()          ? element_path(path, index++)
                                                       : member_path(path, key);
    if (!is_schema) {
      FP4MOE_RETURN_IF_ERROR(walk_tag(inner, at, replace, visit_format));
      continue;
    }
    Result<Json> replaced = replace(inner, at);
    if (!replaced.ok()) return replaced.status();
    inner = std::move(replaced).value();
  }
  return {};
}

Result<Json> enforced_schema(const Json& schema, const std::string& path) {
  SchemaCheck check(schema, path);
  if (const Status status = check.check(); !status.ok()) return status;
  return check.rewritten();
}

Result<std::string> enforced_regex(const std::string& pattern) {
  FP4MOE_RETURN_IF_ERROR(check_regex(pattern));
  return join_surrogates(pattern);
}

// Replaces the pattern of {"type": "regex", "pattern": ...}.
Status enforce_regex_format(Json& format) {
  const Json *type = member(format, "type"), *pattern = member(format, "pattern");
  if (type == nullptr || *type != "regex" || pattern == nullptr || !pattern->is_string()) return {};
  const Result<std::string> enforced = enforced_regex(pattern->get<std::string>());
  if (!enforced.ok()) return enforced.status();
  format["pattern"] = *enforced;
  return {};
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

void consider_schema(const Json& root, const std::string& path, Part& costliest) {
  (void)walk_schema(root, path, [&](const Json& schema, const std::string& at) {
    if (const Json* pattern = member(schema, "pattern"); pattern != nullptr && pattern->is_string())
      RepetitionScan(pattern->get_ref<const std::string&>(), false).find(costliest);
    if (const Json* names = member(schema, "properties"); names != nullptr && names->is_object()) {
      const Json* required = member(schema, "required");
      const size_t num_required = required != nullptr && required->is_array() ? required->size() : 0;
      const double num_optional = static_cast<double>(names->size()) - static_cast<double>(num_required);
      consider(costliest, std::max(num_optional * num_optional / 4, static_cast<double>(names->size())), [&] {
        return short_path(at) + " has " + std::to_string(names->size()) + " properties, of which " +
               std::to_string(num_required) + " are required; use fewer, or require more of them";
      });
    }
    for (const char* key : {"minLength", "maxLength", "minItems", "maxItems"})
      if (const Json* count = member(schema, key); count != nullptr && count->is_number_unsigned())
        consider(costliest, count->get<double>(), [&] {
          return short_path(member_path(at, key)) + " " + count->dump() +
                 " is large; use a lower value, or none";
        });
    return Status();
  });
}

void consider_tag(Json root, Part& costliest) {
  (void)walk_tag(
      root, "$",
      [&](const Json& schema, const std::string& path) -> Result<Json> {
        consider_schema(schema, path, costliest);
        return schema;
      },
      [&](const Json& format) -> Status {
        for (const char* key : {"pattern", "grammar"})
          if (const Json* text = member(format, key); text != nullptr && text->is_string())
            RepetitionScan(text->get_ref<const std::string&>(), key[0] == 'g').find(costliest);
        return {};
      });
}

Json parse(const std::string& text) { return Json::parse(text, nullptr, /*allow_exceptions=*/false); }

}  // namespace

Result<std::string> enforced_text(const GrammarSpec& spec) {
  FP4MOE_RETURN_IF_ERROR(check_nesting(spec.text));
  if (spec.kind == Kind::kRegex) return enforced_regex(spec.text);
  if (spec.kind != Kind::kJsonSchema && spec.kind != Kind::kStructuralTag) return spec.text;
  Json json = parse(spec.text);
  const bool is_schema = spec.kind == Kind::kJsonSchema;
  if (json.is_discarded())
    return invalid_argument(std::string("the ") + (is_schema ? "JSON schema" : "structural tag") +
                            " is not valid JSON");
  if (is_schema) {
    Result<Json> schema = enforced_schema(json, "$");
    if (!schema.ok()) return schema.status();
    return schema->dump();
  }
  FP4MOE_RETURN_IF_ERROR(walk_tag(json, "$", enforced_schema, enforce_regex_format));
  return json.dump();
}

std::string costliest_part(const GrammarSpec& spec) {
  Part costliest;
  if (spec.kind == Kind::kRegex || spec.kind == Kind::kEbnf)
    RepetitionScan(spec.text, spec.kind == Kind::kEbnf).find(costliest);
  if (spec.kind == Kind::kJsonSchema) consider_schema(parse(spec.text), "$", costliest);
  if (spec.kind == Kind::kStructuralTag) consider_tag(parse(spec.text), costliest);
  return costliest.text;
}

}  // namespace fp4moe
