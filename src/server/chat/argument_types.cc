#include "server/chat/argument_types.h"

#include <algorithm>

#include "server/chat/call_text.h"

namespace fp4moe {

namespace {

// A set of JSON types.
constexpr unsigned kString = 1, kInteger = 2, kNumber = 4, kBoolean = 8, kNull = 16, kArray = 32,
                   kObject = 64, kAnyType = 127;
constexpr int kMaxSchemaDepth = 16;  // also ends cycles of references

unsigned type_of(const json& value) {
  if (value.is_string()) return kString;
  if (value.is_number_integer()) return kInteger | kNumber;
  if (value.is_number()) return kNumber;
  if (value.is_boolean()) return kBoolean;
  if (value.is_array()) return kArray;
  return value.is_object() ? kObject : kNull;
}

unsigned type_named(const json& name) {
  if (name == "string") return kString;
  if (name == "integer") return kInteger;
  if (name == "number") return kInteger | kNumber;
  if (name == "boolean") return kBoolean;
  if (name == "array") return kArray;
  if (name == "object") return kObject;
  return name == "null" ? kNull : kAnyType;
}

// The schema at "#/a/b" in `root`, or null if `root` has nothing at this place.
const json* referenced(const json& root, const json& reference) {
  if (!reference.is_string() || !reference.get_ref<const std::string&>().starts_with("#")) return nullptr;
  std::string_view path = std::string_view(reference.get_ref<const std::string&>()).substr(1);
  const json* schema = &root;
  while (!path.empty()) {
    if (path[0] != '/') return nullptr;
    const size_t end = std::min(path.find('/', 1), path.size());
    const auto found = schema->find(std::string(path.substr(1, end - 1)));
    if (found == schema->end()) return nullptr;
    schema = &*found;
    path.remove_prefix(end);
  }
  return schema;
}

unsigned types_of(const json& schema, const json& root, int depth) {
  if (!schema.is_object() || depth > kMaxSchemaDepth) return kAnyType;
  unsigned types = kAnyType;
  const auto each = [&](const char* key, auto&& set_of) {
    const auto found = schema.find(key);
    if (found == schema.end()) return;
    unsigned any = 0;
    for (const json& item : found->is_array() ? *found : json::array({*found})) any |= set_of(item);
    types &= any;
  };
  const auto nested = [&](const json& branch) { return types_of(branch, root, depth + 1); };
  each("type", type_named);
  each("enum", type_of);
  each("anyOf", nested);
  each("oneOf", nested);
  if (const auto constant = schema.find("const"); constant != schema.end()) types &= type_of(*constant);
  if (const auto all = schema.find("allOf"); all != schema.end() && all->is_array())
    for (const json& part : *all) types &= nested(part);
  if (const auto reference = schema.find("$ref"); reference != schema.end())
    if (const json* target = referenced(root, *reference)) types &= nested(*target);
  return types;
}

// The JSON of Python's True, False or None if `types` allow the value but no string, else `text`.
std::string without_python(std::string_view text, unsigned types) {
  if ((types & kString) == 0) {
    if ((types & kBoolean) != 0 && text == "True") return "true";
    if ((types & kBoolean) != 0 && text == "False") return "false";
    if ((types & kNull) != 0 && text == "None") return "null";
  }
  return std::string(text);
}

// Whether a string of the schema is limited by more than its type.
bool limits_text(const json& schema, const json& root, int depth) {
  if (!schema.is_object() || depth > kMaxSchemaDepth) return false;
  for (const char* key : {"enum", "const", "pattern", "format", "minLength", "maxLength"})
    if (schema.contains(key)) return true;
  for (const char* key : {"anyOf", "oneOf", "allOf"})
    if (const auto found = schema.find(key); found != schema.end() && found->is_array())
      for (const json& branch : *found)
        if (limits_text(branch, root, depth + 1)) return true;
  const auto reference = schema.find("$ref");
  const json* target = reference == schema.end() ? nullptr : referenced(root, *reference);
  return target != nullptr && limits_text(*target, root, depth + 1);
}

}  // namespace

void ArgumentTypes::add(const std::string& function, const json& parameters) {
  std::map<std::string, Parameter>& of_function = parameters_[function];
  const auto properties = parameters.find("properties");
  if (properties == parameters.end() || !properties->is_object()) return;
  for (const auto& [name, schema] : properties->items())
    of_function[name] = {types_of(schema, parameters, 0), limits_text(schema, parameters, 0)};
}

ArgumentTypes::Parameter ArgumentTypes::find(const std::string& function,
                                             const std::string& parameter) const {
  const auto of_function = parameters_.find(function);
  if (of_function == parameters_.end()) return {kAnyType, false};
  const auto found = of_function->second.find(parameter);
  return found == of_function->second.end() ? Parameter{kAnyType, false} : found->second;
}

bool ArgumentTypes::has(const std::string& function, const std::string& parameter) const {
  const auto found = parameters_.find(function);
  return found != parameters_.end() && found->second.contains(parameter);
}

bool ArgumentTypes::is_text(const std::string& function, const std::string& parameter) const {
  return find(function, parameter).types == kString;
}

bool ArgumentTypes::may_be_text(const std::string& function, const std::string& parameter) const {
  return (find(function, parameter).types & kString) != 0;
}

bool ArgumentTypes::is_trimmed(const std::string& function, const std::string& parameter) const {
  return find(function, parameter).limits_text;
}

std::string ArgumentTypes::to_json(const std::string& function, const std::string& parameter,
                                   std::string_view text) const {
  const Parameter known = find(function, parameter);
  const std::string value = without_python(trimmed(text), known.types);
  const Result<json> parsed = parse_json(value);
  const bool stays_text =
      (known.types & kString) != 0 && parsed.ok() && (known.types & type_of(*parsed)) == 0;
  // The parser takes a NUL as the end of the text.
  if (parsed.ok() && !stays_text && value.find('\0') == value.npos) return value;
  return "\"" + json_escaped(known.limits_text ? value : text) + "\"";
}

std::string json_escaped(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string escaped;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      escaped += {'\\', c};
    else if (c == '\n')
      escaped += "\\n";
    else if (byte < 0x20)
      escaped += {'\\', 'u', '0', '0', kHex[byte >> 4], kHex[byte & 15]};
    else
      escaped += c;
  }
  return escaped;
}

}  // namespace fp4moe
