#include "engine/grammar/json_schema.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <set>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr size_t kMaxQuoted = 60;  // bytes of client text in a message
constexpr size_t kMaxPath = 200;   // bytes of a path in a message
constexpr int kMaxHops = 16;       // references that lead from one schema to the next
constexpr int kMaxTypeDepth = 64;  // references and unions; the evaluation recurses

constexpr std::array<std::string_view, 43> kAssertions = {
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "type",
    "const",
    "enum",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "properties",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "required",
    "minProperties",
    "maxProperties",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
};

constexpr std::array<std::pair<std::string_view, unsigned>, 7> kTypeNames = {{
    {"null", kNullType},
    {"boolean", kBooleanType},
    {"object", kObjectType},
    {"array", kArrayType},
    {"string", kStringType},
    {"integer", kIntegerType},
    {"number", kIntegerType | kFractionType},
}};

unsigned type_of_name(const SchemaJson& name) {
  if (!name.is_string()) return 0;
  for (const auto& [known, types] : kTypeNames)
    if (known == name.get_ref<const std::string&>()) return types;
  return 0;
}

unsigned type_of_value(const SchemaJson& value) {
  switch (value.type()) {
    case SchemaJson::value_t::null:
      return kNullType;
    case SchemaJson::value_t::boolean:
      return kBooleanType;
    case SchemaJson::value_t::object:
      return kObjectType;
    case SchemaJson::value_t::array:
      return kArrayType;
    case SchemaJson::value_t::string:
      return kStringType;
    case SchemaJson::value_t::number_integer:
    case SchemaJson::value_t::number_unsigned:
      return kIntegerType;
    default:
      return kIntegerType | kFractionType;
  }
}

// The path of "#/$defs/Node" is $.$defs.Node.
std::string ref_path(std::string path, std::string_view ref) {
  for (size_t begin = 2; begin < ref.size();) {
    const size_t end = std::min(ref.find('/', begin), ref.size());
    path = member_path(path, ref.substr(begin, end - begin));
    begin = end + 1;
  }
  return path;
}

}  // namespace

std::string in_quotes(std::string_view text) {
  std::string result = "\"";
  for (const char c : text.substr(0, kMaxQuoted)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > kMaxQuoted ? "...\"" : "\"");
}

std::string member_path(const std::string& path, std::string_view name) {
  const bool is_plain =
      !name.empty() && name.size() <= kMaxQuoted && std::all_of(name.begin(), name.end(), [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$';
      });
  return path + (is_plain ? "." + std::string(name) : "[" + in_quotes(name) + "]");
}

std::string element_path(const std::string& path, size_t index) {
  return path + "[" + std::to_string(index) + "]";
}

std::string short_path(const std::string& path) {
  return path.size() <= kMaxPath ? path : "..." + path.substr(path.size() - kMaxPath);
}

Status schema_error(const std::string& path, const std::string& keyword, const SchemaJson& schema,
                    const std::string& reason) {
  std::string value;
  if (const SchemaJson* given = member(schema, keyword); given != nullptr && !given->is_structured())
    value = " " + (given->is_string() ? in_quotes(given->get_ref<const std::string&>()) : given->dump());
  return invalid_argument(short_path(member_path(path, keyword)) + value + " " + reason);
}

bool is_assertion(std::string_view keyword) {
  return std::find(kAssertions.begin(), kAssertions.end(), keyword) != kAssertions.end();
}

const SchemaJson* member(const SchemaJson& value, const std::string& name) {
  if (!value.is_object()) return nullptr;
  const auto found = value.find(name);
  return found == value.end() ? nullptr : &*found;
}

const SchemaJson* resolve_ref(const SchemaJson& root, const std::string& ref) {
  if (ref == "#") return &root;
  if (!ref.starts_with("#/") || ref.find_first_of("~%") != std::string::npos) return nullptr;
  const SchemaJson* at = &root;
  for (size_t begin = 2; begin <= ref.size();) {
    const size_t end = std::min(ref.find('/', begin), ref.size());
    at = member(*at, ref.substr(begin, end - begin));
    if (at == nullptr) return nullptr;
    begin = end + 1;
  }
  return at->is_object() || at->is_boolean() ? at : nullptr;
}

const SchemaJson* follow_refs(const SchemaJson& root, const SchemaJson& schema) {
  const SchemaJson* at = &schema;
  for (int hop = 0; hop < kMaxHops && at != nullptr; ++hop) {
    const SchemaJson* ref = member(*at, "$ref");
    if (ref == nullptr) return at;
    at = ref->is_string() ? resolve_ref(root, ref->get_ref<const std::string&>()) : nullptr;
  }
  return nullptr;
}

unsigned SchemaTypes::within(const SchemaJson& schema, int depth) {
  if (!schema.is_object() || depth > kMaxTypeDepth) return kAllTypes;
  const auto [known, is_new] = known_.emplace(&schema, kAllTypes);  // seen again inside itself: all types
  if (is_new) known->second = evaluate(schema, depth);
  return known->second;
}

unsigned SchemaTypes::evaluate(const SchemaJson& schema, int depth) {
  if (const SchemaJson* ref = member(schema, "$ref")) {
    const SchemaJson* target =
        ref->is_string() ? resolve_ref(root_, ref->get_ref<const std::string&>()) : nullptr;
    return target == nullptr ? kAllTypes : within(*target, depth + 1);
  }
  unsigned types = 0;
  if (const SchemaJson* value = member(schema, "const")) return type_of_value(*value);
  if (const SchemaJson* values = member(schema, "enum"); values != nullptr && values->is_array()) {
    for (const SchemaJson& value : *values) types |= type_of_value(value);
    return types;
  }
  for (const char* keyword : {"anyOf", "oneOf", "allOf"}) {
    const SchemaJson* branches = member(schema, keyword);
    if (branches == nullptr || !branches->is_array()) continue;
    for (const SchemaJson& branch : *branches) types |= within(branch, depth + 1);
    return types;
  }
  if (schema.contains("type")) return declared_types(schema);
  if (of_ == Of::kMatches) return kAllTypes;
  for (const char* keyword : {"properties", "additionalProperties", "unevaluatedProperties"})
    if (schema.contains(keyword)) return kObjectType;
  for (const char* keyword : {"items", "prefixItems", "unevaluatedItems"})
    if (schema.contains(keyword)) return kArrayType;
  return kAllTypes;
}

unsigned declared_types(const SchemaJson& schema) {
  const SchemaJson* type = member(schema, "type");
  if (type == nullptr) return kAllTypes;
  if (!type->is_array()) return type_of_name(*type);
  unsigned types = 0;
  for (const SchemaJson& name : *type) {
    if (type_of_name(name) == 0) return 0;
    types |= type_of_name(name);
  }
  return types;
}

Status walk_schema(const SchemaJson& root, const std::string& path, const SchemaVisit& visit) {
  std::set<const SchemaJson*> seen;
  std::vector<std::pair<const SchemaJson*, std::string>> found;  // in the order of visits
  const auto add = [&](const SchemaJson& schema, std::string at) {
    if (schema.is_object() && seen.insert(&schema).second) found.emplace_back(&schema, std::move(at));
  };
  const auto add_members = [&](const SchemaJson& schemas, const std::string& at) {
    size_t index = 0;
    for (const auto& [name, inner] : schemas.items())
      add(inner, schemas.is_array() ? element_path(at, index++) : member_path(at, name));
  };
  add(root, path);
  for (size_t next = 0; next < found.size(); ++next) {
    const auto [schema, at] = found[next];
    FP4MOE_RETURN_IF_ERROR(visit(*schema, at));
    for (const char* keyword : {"items", "additionalItems", "additionalProperties", "propertyNames",
                                "unevaluatedItems", "unevaluatedProperties"})
      if (const SchemaJson* inner = member(*schema, keyword)) add(*inner, member_path(at, keyword));
    for (const char* keyword :
         {"properties", "patternProperties", "anyOf", "oneOf", "allOf", "prefixItems", "items"})
      if (const SchemaJson* inner = member(*schema, keyword);
          inner != nullptr && (inner->is_array() || std::string_view(keyword) != "items"))
        add_members(*inner, member_path(at, keyword));
    const SchemaJson* ref = member(*schema, "$ref");
    if (ref == nullptr || !ref->is_string()) continue;
    const std::string& text = ref->get_ref<const std::string&>();
    if (const SchemaJson* target = resolve_ref(root, text)) add(*target, ref_path(path, text));
  }
  return {};
}

}  // namespace fp4moe
