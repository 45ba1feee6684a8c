#include "engine/grammar/schema_unions.h"

#include <algorithm>
#include <utility>

namespace fp4moe {
namespace {

constexpr int64_t kMaxUnionSteps = 5'000'000;  // properties and constants compared: less than a second
constexpr size_t kMaxTags = 16;                // properties of a branch that are tried as its tag
constexpr int kMaxUnionDepth = 16;             // unions nested in unions

bool is_closed(const SchemaJson& schema) {
  for (const char* keyword : {"additionalProperties", "unevaluatedProperties"})
    if (const SchemaJson* other = member(schema, keyword); other != nullptr && *other != false) return false;
  const SchemaJson* properties = member(schema, "properties");
  return !schema.contains("patternProperties") && !schema.contains("propertyNames") &&
         properties != nullptr && properties->is_object();
}

// Equal numbers can have different texts (1 and 1.0), also inside arrays and objects.
bool is_exact_text(const std::string& json) {
  if (json[0] == '"' || json == "true" || json == "false" || json == "null") return true;
  return json.find_first_of("{[.eE") == std::string::npos;
}

}  // namespace

bool UnionCheck::spend(size_t steps) {
  steps_ += static_cast<int64_t>(steps);
  return steps_ <= kMaxUnionSteps;
}

std::optional<UnionCheck::Values> UnionCheck::constants_of(const SchemaJson& schema) {
  const SchemaJson* target = follow_refs(root_, schema);
  if (target == nullptr) return {};
  if (const SchemaJson* value = member(*target, "const")) return Values{value->dump()};
  const SchemaJson* list = member(*target, "enum");
  if (list == nullptr || !list->is_array() || !spend(10 * list->size())) return {};
  Values values;
  for (const SchemaJson& value : *list) values.insert(value.dump());
  return values;
}

bool UnionCheck::requires_property(const SchemaJson& object, const std::string& name) {
  const SchemaJson* required = member(object, "required");
  return required != nullptr && required->is_array() && spend(required->size()) &&
         std::any_of(required->begin(), required->end(), [&](const SchemaJson& other) {
           return other.is_string() && other.get_ref<const std::string&>() == name;
         });
}

// The constants of a branch's property; for a branch that is a union, of all its branches.
std::optional<UnionCheck::Values> UnionCheck::tags_of(const SchemaJson& branch, UnionTag& tag, int depth) {
  const SchemaJson* target = follow_refs(root_, branch);
  if (target == nullptr || depth == 0 || !spend(10)) return {};
  for (const char* keyword : {"anyOf", "oneOf"}) {
    const SchemaJson* branches = member(*target, keyword);
    if (branches == nullptr) continue;
    Values all;
    for (const SchemaJson& inner : *branches) {
      const std::optional<Values> values = tags_of(inner, tag, depth - 1);
      if (!values.has_value()) return {};
      all.insert(values->begin(), values->end());
    }
    return all;
  }
  const SchemaJson* properties = member(*target, "properties");
  if (properties == nullptr || types_.of(*target) != kObjectType || !spend(properties->size())) return {};
  const SchemaJson* property = member(*properties, tag.property);
  if (property == nullptr) return {};
  if (!requires_property(*target, tag.property)) tag.optional_in.push_back(target);
  return constants_of(*property);
}

// The discriminator's property, or those of the first branch that have constants.
std::vector<std::string> UnionCheck::possible_tags(const SchemaJson& schema) {
  std::vector<std::string> names;
  const SchemaJson* discriminator = member(schema, "discriminator");
  const SchemaJson* name = discriminator == nullptr ? nullptr : member(*discriminator, "propertyName");
  if (name != nullptr && name->is_string()) names.push_back(name->get<std::string>());
  const SchemaJson* branch = &schema;
  for (int depth = 0; branch != nullptr && depth < kMaxUnionDepth; ++depth) {
    const SchemaJson* inner = member(*branch, "oneOf");
    if (inner == nullptr || !inner->is_array() || inner->empty()) break;
    branch = follow_refs(root_, *inner->begin());
  }
  const SchemaJson* properties = branch == nullptr ? nullptr : member(*branch, "properties");
  if (properties == nullptr || !properties->is_object()) return names;
  size_t tried = 0;
  for (const auto& [property, value] : properties->items())
    if (++tried <= kMaxTags && constants_of(value).has_value()) names.push_back(property);
  return names;
}

std::optional<UnionTag> UnionCheck::find_tag(const SchemaJson& schema) {
  for (const std::string& name : possible_tags(schema)) {
    UnionTag tag{name, {}};
    Values all;
    bool is_tag = true;
    for (const SchemaJson& branch : *member(schema, "oneOf")) {
      const std::optional<Values> values = tags_of(branch, tag, kMaxUnionDepth);
      is_tag = values.has_value() && !share_a_constant(*values, all);
      if (!is_tag) break;
      all.insert(values->begin(), values->end());
    }
    if (is_tag) return tag;
  }
  return {};
}

// Constants that may be equal although their texts differ count as shared.
bool UnionCheck::share_a_constant(const Values& a, const Values& b) {
  return !std::all_of(a.begin(), a.end(), is_exact_text) ||
         std::any_of(a.begin(), a.end(), [&](const std::string& value) { return b.contains(value); });
}

bool UnionCheck::differ(const std::optional<Values>& a, const std::optional<Values>& b) {
  return a.has_value() && b.has_value() && !share_a_constant(*a, *b) && !share_a_constant(*b, *a);
}

bool UnionCheck::has_distinct_constants(const SchemaJson& branches) {
  Values all;
  for (const SchemaJson& branch : branches) {
    const std::optional<Values> values = constants_of(branch);
    if (!values.has_value() || share_a_constant(*values, all)) return false;
    all.insert(values->begin(), values->end());
  }
  return true;
}

UnionCheck::Branch UnionCheck::branch_of(const SchemaJson& schema) {
  Branch branch{types_.of(schema), matches_.of(schema), constants_of(schema), nullptr};
  const SchemaJson* target = follow_refs(root_, schema);
  if (target == nullptr || branch.types != kObjectType || branch.constants.has_value()) return branch;
  for (const char* keyword : {"anyOf", "oneOf", "allOf"})
    if (target->contains(keyword)) return branch;
  if (is_closed(*target)) branch.object = target;
  return branch;
}

// Whether `a` requires a property that outputs of `b` do not have, or have with other constants.
bool UnionCheck::requires_what_is_missing(const SchemaJson& a, const SchemaJson& b) {
  const SchemaJson* required = member(a, "required");
  if (required == nullptr || !required->is_array()) return false;
  const SchemaJson &own_properties = *member(a, "properties"), &other_properties = *member(b, "properties");
  size_t tried = 0;
  for (const SchemaJson& name : *required) {
    if (!name.is_string() || ++tried > kMaxTags) continue;
    if (!spend(own_properties.size() + other_properties.size())) return false;
    const SchemaJson* own = member(own_properties, name.get<std::string>());
    const SchemaJson* other = member(other_properties, name.get<std::string>());
    if (other == nullptr) return true;
    if (own == nullptr) continue;
    if (differ(constants_of(*own), constants_of(*other))) return true;
  }
  return false;
}

bool UnionCheck::are_disjoint(const Branch& a, const Branch& b) {
  if (!spend(1)) return false;
  if ((a.types & b.matches) == 0 && (b.types & a.matches) == 0) return true;
  if (differ(a.constants, b.constants)) return true;
  return a.object != nullptr && b.object != nullptr && requires_what_is_missing(*a.object, *b.object) &&
         requires_what_is_missing(*b.object, *a.object);
}

Result<UnionTag> UnionCheck::check(const SchemaJson& schema, const std::string& path) {
  const SchemaJson& list = *member(schema, "oneOf");
  if (has_distinct_constants(list)) return UnionTag{};
  if (const std::optional<UnionTag> tag = find_tag(schema)) return *tag;
  std::vector<Branch> branches;
  for (const SchemaJson& branch : list) branches.push_back(branch_of(branch));
  for (size_t b = 1; b < branches.size(); ++b)
    for (size_t a = 0; a < b; ++a) {
      if (are_disjoint(branches[a], branches[b])) continue;
      if (steps_ > kMaxUnionSteps)
        return invalid_argument(short_path(path) +
                                ": comparing the branches takes too long; use anyOf, or fewer branches");
      return invalid_argument(
          short_path(path) + ": one value can match both its branches [" + std::to_string(a) + "] and [" +
          std::to_string(b) +
          "], and a grammar cannot exclude that; give each branch a required property with a different "
          "\"const\", or use anyOf");
    }
  return UnionTag{};
}

}  // namespace fp4moe
