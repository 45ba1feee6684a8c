#include "engine/grammar/schema_check.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string_view>

#include "base/check.h"
#include "engine/grammar/schema_bounds.h"

namespace fp4moe {
namespace {

constexpr std::array<std::pair<std::string_view, const char*>, 12> kUnenforced = {{
    {"not", "cannot be enforced: a grammar cannot exclude values; list the allowed ones with enum or anyOf"},
    {"if", "cannot be enforced; use anyOf with a branch for each case"},
    {"then", "cannot be enforced; use anyOf with a branch for each case"},
    {"else", "cannot be enforced; use anyOf with a branch for each case"},
    {"dependencies", "cannot be enforced; use anyOf with a branch for each case"},
    {"dependentRequired", "cannot be enforced; use anyOf with a branch for each case"},
    {"dependentSchemas", "cannot be enforced; use anyOf with a branch for each case"},
    {"contains", "cannot be enforced; describe every item with items or prefixItems"},
    {"minContains", "cannot be enforced; describe every item with items or prefixItems"},
    {"maxContains", "cannot be enforced; describe every item with items or prefixItems"},
    {"$dynamicRef", "cannot be followed; use $ref"},
    {"$recursiveRef", "cannot be followed; use $ref"},
}};

// Formats of JSON Schema whose syntax xgrammar generates.
constexpr std::array<std::string_view, 12> kEnforcedFormats = {
    "email", "date",     "time", "date-time", "duration",      "ipv4",
    "ipv6",  "hostname", "uuid", "uri",       "uri-reference", "uri-template"};
// Formats of JSON Schema that nothing enforces. Every other name is an annotation.
constexpr std::array<std::string_view, 7> kUnenforcedFormats = {
    "idn-email", "idn-hostname", "iri", "iri-reference", "regex", "json-pointer", "relative-json-pointer"};

// Names that xgrammar drops when it compares schemas, also where they are names of properties.
constexpr std::array<std::string_view, 9> kAnnotations = {"title",     "default",    "description",
                                                          "examples",  "deprecated", "readOnly",
                                                          "writeOnly", "$comment",   "$schema"};

template <typename List>
bool contains_name(const List& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

bool is_schema(const SchemaJson& value) { return value.is_object() || value.is_boolean(); }

// FNV-1a of the text.
std::string digest(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return std::to_string(hash);
}

bool is_beyond_int64(const SchemaJson& value) {
  if (value.is_number_unsigned())
    return value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  return value.is_structured() && std::any_of(value.begin(), value.end(), is_beyond_int64);
}

// The keyword that xgrammar reads first and that makes it skip the others.
std::string leading_keyword(const SchemaJson& schema) {
  for (const char* keyword : {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"})
    if (schema.contains(keyword)) return keyword;
  return "";
}

// The schema of the properties that are not named, or null. Without one, outputs have no such properties.
const SchemaJson* other_properties(const SchemaJson& schema) {
  const SchemaJson* other = member(schema, "additionalProperties");
  return other != nullptr ? other : member(schema, "unevaluatedProperties");
}

bool is_open(const SchemaJson& schema) {
  const SchemaJson* other = other_properties(schema);
  return other != nullptr && *other != false;
}

}  // namespace

Status SchemaCheck::check() {
  if (!is_schema(root_))
    return invalid_argument(std::string("a JSON schema must be an object, not ") + root_.type_name());
  if (root_ == false) return invalid_argument("the schema false matches no value");
  return walk_schema(root_, path_, [this](const SchemaJson& schema, const std::string& path) {
    return check_one(schema, path);
  });
}

Status SchemaCheck::check_one(const SchemaJson& schema, const std::string& path) {
  FP4MOE_RETURN_IF_ERROR(check_bounds(schema, path));
  for (const auto& [keyword, reason] : kUnenforced)
    if (schema.contains(keyword)) return schema_error(path, std::string(keyword), schema, reason);
  if (schema.contains("type") && declared_types(schema) == 0)
    return schema_error(path, "type", schema,
                        "must be null, boolean, object, array, string, integer, number, or a list of these");
  for (const char* keyword : {"properties", "patternProperties"})
    if (const SchemaJson* inner = member(schema, keyword); inner != nullptr && !inner->is_object())
      return schema_error(path, keyword, schema, "must be an object");
  const std::string leading = leading_keyword(schema);
  if (leading.empty()) return check_typed(schema, path);
  FP4MOE_RETURN_IF_ERROR(check_siblings(schema, path, leading));
  if (leading == "$ref") return check_ref(schema, path);
  if (leading == "const" || leading == "enum") return check_constants(schema, path, leading);
  return check_branches(schema, path, leading);
}

Status SchemaCheck::check_siblings(const SchemaJson& schema, const std::string& path,
                                   const std::string& keyword) {
  const bool has_constants = keyword == "const" || keyword == "enum";
  for (const auto& [name, value] : schema.items())
    if (name != keyword && name != "type" && is_assertion(name))
      return schema_error(path, name, schema,
                          "cannot be combined with the " + keyword + " next to it; " +
                              (has_constants       ? "leave it out"
                               : keyword == "$ref" ? "write it in the schema that $ref names"
                                                   : "write it in each schema of " + keyword));
  if ((types_.of(schema) & ~declared_types(schema)) == 0) return {};
  return schema_error(path, "type", schema,
                      has_constants
                          ? "excludes values of the " + keyword + " next to it; remove them, or the type"
                          : "does not limit the " + keyword + " next to it; write it in each of its schemas");
}

// Also refuses a chain of references that ends in itself: it describes no value.
Status SchemaCheck::check_ref(const SchemaJson& schema, const std::string& path) {
  std::set<std::string> seen;
  for (const SchemaJson* at = &schema; at != nullptr && at->is_object();) {
    const SchemaJson* ref = member(*at, "$ref");
    if (ref == nullptr) break;
    if (!ref->is_string()) return schema_error(path, "$ref", schema, "must be a string");
    const std::string& text = ref->get_ref<const std::string&>();
    if (followed_.contains(text)) break;
    if (!seen.insert(text).second)
      return schema_error(path, "$ref", schema,
                          "leads back to itself and describes no value; a schema that refers to itself needs "
                          "another alternative");
    at = resolve_ref(root_, text);
    if (at == nullptr)
      return schema_error(
          path, "$ref", schema,
          "does not lead to a schema; references must be # or #/$defs/NAME, name a schema that "
          "exists, and not lead through a list or a name with / ~ or %");
    if (*at == false) return schema_error(path, "$ref", schema, "leads to false, which matches no value");
  }
  followed_.merge(seen);
  return {};
}

Status SchemaCheck::check_constants(const SchemaJson& schema, const std::string& path,
                                    const std::string& keyword) {
  const SchemaJson& value = *member(schema, keyword);
  if (keyword == "enum" && (!value.is_array() || value.empty()))
    return schema_error(path, keyword, schema, "must be a list of at least one value");
  if (is_beyond_int64(value))
    return schema_error(path, keyword, schema, "has an integer above 9223372036854775807; use a string");
  if (value.is_structured()) edits_[&schema].added.emplace_back("x-members", digest(value.dump()));
  return {};
}

Status SchemaCheck::check_branches(const SchemaJson& schema, const std::string& path,
                                   const std::string& keyword) {
  const SchemaJson& branches = *member(schema, keyword);
  if (!branches.is_array() || branches.empty())
    return schema_error(path, keyword, schema, "must be a list of at least one schema");
  for (size_t i = 0; i < branches.size(); ++i)
    if (!is_schema(branches[i]) || branches[i] == false)
      return invalid_argument(short_path(element_path(member_path(path, keyword), i)) +
                              " must be a schema that matches a value");
  if (keyword == "allOf" && branches.size() > 1)
    return schema_error(path, keyword, schema,
                        "cannot be enforced with more than one schema; merge its schemas into one");
  if (keyword != "oneOf") return {};
  Result<UnionTag> tag = unions_.check(schema, member_path(path, keyword));
  if (!tag.ok()) return tag.status();
  edits_[&schema].renamed["oneOf"] = "anyOf";
  for (const SchemaJson* object : tag->optional_in) edits_[object].required.insert(tag->property);
  return {};
}

Status SchemaCheck::check_typed(const SchemaJson& schema, const std::string& path) {
  unsigned types = types_.of(schema);
  if (name_schemas_.contains(&schema)) types = kStringType;
  if (types == kAllTypes && !schema.contains("type")) {
    for (const auto& [name, value] : schema.items())
      if (is_assertion(name))
        return schema_error(path, name, schema, "has no effect without a \"type\" next to it; add \"type\"");
    return {};
  }
  if ((types & kStringType) != 0) FP4MOE_RETURN_IF_ERROR(check_string(schema, path));
  if ((types & kArrayType) != 0) FP4MOE_RETURN_IF_ERROR(check_array(schema, path));
  if ((types & kObjectType) != 0) FP4MOE_RETURN_IF_ERROR(check_object(schema, path));
  return {};
}

Status SchemaCheck::check_string(const SchemaJson& schema, const std::string& path) {
  for (const char* keyword : {"pattern", "format"})
    if (const SchemaJson* text = member(schema, keyword); text != nullptr && !text->is_string())
      return schema_error(path, keyword, schema, "must be a string");
  const SchemaJson *pattern = member(schema, "pattern"), *format = member(schema, "format");
  if (pattern != nullptr) {
    const std::string& text = pattern->get_ref<const std::string&>();
    FP4MOE_RETURN_IF_ERROR(check_pattern(text, member_path(path, "pattern")));
    if (const std::string ascii = ascii_pattern(text); ascii != text)
      edits_[&schema].added.emplace_back("pattern", ascii);
  }
  const std::string& name = format == nullptr ? "" : format->get_ref<const std::string&>();
  if (contains_name(kUnenforcedFormats, name))
    return schema_error(path, "format", schema, "cannot be enforced; leave it out, or use a pattern");
  bool has_format = contains_name(kEnforcedFormats, name);
  if (pattern != nullptr && has_format) {
    // A pattern for the whole string says more than its format, which is only an annotation for validators.
    const auto& text = pattern->get_ref<const std::string&>();
    if (!text.starts_with('^') || !text.ends_with('$'))
      return schema_error(path, "pattern", schema,
                          "cannot be combined with \"format\": \"" + name +
                              "\"; use a pattern for the whole string (^...$), or the format alone");
    edits_[&schema].renamed["format"] = "";
    has_format = false;
  }
  return pattern != nullptr || has_format ? check_lengths(schema, path, has_format ? name : "") : Status();
}

// Lengths next to a pattern, or to a format that is enforced.
Status SchemaCheck::check_lengths(const SchemaJson& schema, const std::string& path,
                                  const std::string& format) {
  // No text of a format is empty, except of these two.
  const bool is_never_empty = !format.empty() && format != "uri-reference" && format != "uri-template";
  for (const char* keyword : {"minLength", "maxLength"}) {
    const SchemaJson* length = member(schema, keyword);
    if (length == nullptr) continue;
    if (keyword == std::string_view("minLength") && (*length == 0 || (is_never_empty && *length == 1)))
      edits_[&schema].renamed[keyword] = "";
    else if (format.empty())
      return schema_error(path, keyword, schema,
                          "cannot be combined with \"pattern\"; write the length in the pattern, such as "
                          "^[a-z]{2,8}$, or leave it out");
    else
      return schema_error(path, keyword, schema,
                          "cannot be combined with \"format\": \"" + format +
                              "\"; use one of the two, and check the other in the output");
  }
  return {};
}

Status SchemaCheck::check_prefix(const SchemaJson& schema, const std::string& path,
                                 const std::string& keyword) {
  const SchemaJson& list = *member(schema, keyword);
  if (!list.is_array()) return schema_error(path, keyword, schema, "must be a list of schemas");
  for (size_t i = 0; i < list.size(); ++i)
    if (!list[i].is_object())
      return invalid_argument(short_path(element_path(member_path(path, keyword), i)) +
                              " must be a schema object; {} matches every value");
  const SchemaJson *least = member(schema, "minItems"), *most = member(schema, "maxItems");
  if (most != nullptr && *most < list.size())
    return schema_error(path, "maxItems", schema,
                        "must be at least the number of schemas in " + keyword + ", " +
                            std::to_string(list.size()) + "; leave out the last ones");
  const SchemaJson* rest = member(schema, keyword == "items" ? "additionalItems" : "items");
  if (least != nullptr && *least > list.size() && (rest == nullptr || *rest == false))
    return schema_error(path, "minItems", schema,
                        "must be at most the number of schemas in " + keyword + ", " +
                            std::to_string(list.size()) + ", unless another keyword allows more items");
  return {};
}

Status SchemaCheck::check_array(const SchemaJson& schema, const std::string& path) {
  if (const SchemaJson* unique = member(schema, "uniqueItems")) {
    if (*unique != false)
      return schema_error(path, "uniqueItems", schema,
                          "cannot be enforced: equal items cannot be excluded; leave it out, and remove "
                          "duplicates from the output");
    edits_[&schema].renamed["uniqueItems"] = "";
  }
  const SchemaJson* items = member(schema, "items");
  if (items != nullptr && items->is_array()) {
    if (schema.contains("prefixItems"))
      return schema_error(path, "items", schema, "must be a schema next to prefixItems, not a list");
    edits_[&schema].renamed["items"] = "prefixItems";
    edits_[&schema].renamed["additionalItems"] = "items";
    return check_prefix(schema, path, "items");
  }
  for (const char* keyword : {"items", "unevaluatedItems", "additionalItems"})
    if (const SchemaJson* inner = member(schema, keyword); inner != nullptr && !is_schema(*inner))
      return schema_error(path, keyword, schema, "must be a schema");
  if (schema.contains("prefixItems")) return check_prefix(schema, path, "prefixItems");
  // xgrammar would generate no items.
  if (items == nullptr && !schema.contains("unevaluatedItems"))
    edits_[&schema].added.emplace_back("items", SchemaJson::object());
  const SchemaJson* least = member(schema, "minItems");
  const SchemaJson* any = items != nullptr ? items : member(schema, "unevaluatedItems");
  if (any != nullptr && *any == false && least != nullptr && *least > 0)
    return schema_error(path, "minItems", schema, "must be 0, because no items are allowed");
  return {};
}

Status SchemaCheck::check_object(const SchemaJson& schema, const std::string& path) {
  if (const SchemaJson* properties = member(schema, "properties"))
    for (const auto& [name, value] : properties->items())
      if (!is_schema(value) || value == false)
        return invalid_argument(short_path(member_path(member_path(path, "properties"), name)) +
                                " must be a schema that matches a value; leave the property out");
  for (const char* keyword : {"additionalProperties", "unevaluatedProperties", "propertyNames"})
    if (const SchemaJson* inner = member(schema, keyword); inner != nullptr && !is_schema(*inner))
      return schema_error(path, keyword, schema, "must be a schema, true or false");
  if (schema.contains("patternProperties")) FP4MOE_RETURN_IF_ERROR(check_name_patterns(schema, path));
  if (schema.contains("propertyNames")) FP4MOE_RETURN_IF_ERROR(check_names(schema, path));
  FP4MOE_RETURN_IF_ERROR(check_required(schema, path));
  FP4MOE_RETURN_IF_ERROR(check_num_properties(schema, path));
  tell_apart(schema);
  return {};
}

Status SchemaCheck::check_num_properties(const SchemaJson& schema, const std::string& path) {
  const SchemaJson *least = member(schema, "minProperties"), *most = member(schema, "maxProperties");
  const SchemaJson *properties = member(schema, "properties"), *required = member(schema, "required");
  const size_t num_required = required == nullptr ? 0 : required->size();
  const size_t num_named = properties == nullptr ? 0 : properties->size();
  if (most != nullptr && *most < num_required)
    return schema_error(
        path, "maxProperties", schema,
        "must be at least the number of required properties, " + std::to_string(num_required));
  if (least == nullptr) return {};
  const bool has_other =
      is_open(schema) || schema.contains("patternProperties") || schema.contains("propertyNames");
  if (!has_other && *least > num_named)
    return schema_error(path, "minProperties", schema,
                        "must be at most the number of properties, " + std::to_string(num_named) +
                            ", unless additionalProperties allows more");
  if (has_other && *least > 1 && *least > num_required)
    return schema_error(path, "minProperties", schema,
                        "cannot be enforced above 1 for names that are not in properties, because a name can "
                        "be generated twice; list the names in properties, or use a list of objects");
  return {};
}

Status SchemaCheck::check_required(const SchemaJson& schema, const std::string& path) {
  const SchemaJson* required = member(schema, "required");
  if (required == nullptr) return {};
  if (!required->is_array()) return schema_error(path, "required", schema, "must be a list of names");
  std::set<std::string> names;
  if (const SchemaJson* properties = member(schema, "properties"))
    for (const auto& [name, value] : properties->items()) names.insert(name);
  for (const SchemaJson& name : *required) {
    if (!name.is_string()) return schema_error(path, "required", schema, "must be a list of names");
    const auto& text = name.get_ref<const std::string&>();
    if (!names.insert(text).second) continue;
    const SchemaJson* allowed = member(schema, "propertyNames");
    const SchemaJson* values = allowed == nullptr ? nullptr : member(*allowed, "enum");
    const bool is_allowed =
        allowed == nullptr || (values != nullptr && values->is_array() &&
                               std::find(values->begin(), values->end(), name) != values->end());
    if (!is_open(schema) || !is_allowed || schema.contains("patternProperties"))
      return schema_error(path, "required", schema,
                          "names " + in_quotes(text) +
                              ", which no property describes, so outputs could not have it; add it to "
                              "properties");
    edits_[&schema].properties.emplace_back(text, other_properties(schema));
  }
  return {};
}

Status SchemaCheck::check_names(const SchemaJson& schema, const std::string& path) {
  const SchemaJson& names = *member(schema, "propertyNames");
  if (names == true) {
    edits_[&schema].renamed["propertyNames"] = "";
    return {};
  }
  if (schema.contains("properties") || !names.is_object())
    return schema_error(
        path, "propertyNames", schema,
        "cannot be enforced next to properties; leave it out, or use additionalProperties alone");
  if (other_properties(schema) != nullptr && !is_open(schema))
    return schema_error(path, "propertyNames", schema,
                        "has no names to limit, because other properties are excluded; leave it out");
  if (types_.of(names) == kStringType) return {};
  if (types_.of(names) != kAllTypes || !leading_keyword(names).empty())
    return schema_error(path, "propertyNames", schema, "must describe strings only");
  edits_[&names].added.emplace_back("type", "string");
  name_schemas_.insert(&names);
  return {};
}

Status SchemaCheck::check_name_patterns(const SchemaJson& schema, const std::string& path) {
  const SchemaJson& patterns = *member(schema, "patternProperties");
  const std::string place = member_path(path, "patternProperties");
  for (const char* other : {"properties", "propertyNames"})
    if (schema.contains(other))
      return schema_error(path, "patternProperties", schema,
                          std::string("cannot be enforced next to ") + other + "; use one of the two");
  if (patterns.size() > 1)
    return schema_error(path, "patternProperties", schema,
                        "cannot be enforced with more than one pattern, because a name may match several; "
                        "join them with |");
  for (const auto& [pattern, value] : patterns.items()) {
    FP4MOE_RETURN_IF_ERROR(check_pattern(pattern, place));
    if (ascii_pattern(pattern) != pattern)
      return invalid_argument(short_path(place) + " " + in_quotes(pattern) +
                              " must be ASCII; write other characters as \\u{...}");
    if (!is_schema(value) || value == false)
      return invalid_argument(short_path(member_path(place, pattern)) +
                              " must be a schema that matches a value");
  }
  return {};
}

// xgrammar compares schemas without their annotations and without the order of their members, also where
// these are properties, and uses the first for all equal ones.
void SchemaCheck::tell_apart(const SchemaJson& schema) {
  const SchemaJson* properties = member(schema, "properties");
  if (properties == nullptr) return;
  std::string names;
  for (const auto& [name, value] : properties->items()) {
    names += name + "\n";
    if (contains_name(kAnnotations, name)) names += value.dump();
  }
  edits_[&schema].added.emplace_back("x-members", digest(names));
}

SchemaJson SchemaCheck::rewrite(const SchemaJson& value) const {
  if (value.is_object()) {
    const auto edit = edits_.find(&value);
    return rewrite_object(value, edit == edits_.end() ? SchemaEdit{} : edit->second);
  }
  if (!value.is_array()) return value;
  SchemaJson list = SchemaJson::array();
  for (const SchemaJson& item : value) list.push_back(rewrite(item));
  return list;
}

SchemaJson SchemaCheck::rewrite_object(const SchemaJson& value, const SchemaEdit& edit) const {
  std::vector<std::pair<std::string, SchemaJson>> members;  // unique names: no search for each
  for (const auto& [name, inner] : value.items()) {
    const auto renamed = edit.renamed.find(name);
    if (renamed != edit.renamed.end() && renamed->second.empty()) continue;
    members.emplace_back(renamed == edit.renamed.end() ? name : renamed->second, rewrite(inner));
  }
  SchemaJson object = SchemaJson::object();
  auto& list = object.get_ref<SchemaJson::object_t&>();
  for (auto& [name, inner] : members) list.push_back({std::move(name), std::move(inner)});
  for (const auto& [name, inner] : edit.properties) object["properties"][name] = rewrite(*inner);
  for (const std::string& name : edit.required) object["required"].push_back(name);
  for (const auto& [name, inner] : edit.added) object[name] = inner;
  return object;
}

}  // namespace fp4moe
