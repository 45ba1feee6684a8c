// Branches of "oneOf": exactly one must match, which a grammar guarantees only if no two branches can match
// the same value.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/grammar/json_schema.h"

namespace fp4moe {

// A property that tells the branches apart, and the objects that have to require it. Without a name, the
// branches differ by something else.
struct UnionTag {
  std::string property;
  std::vector<const SchemaJson*> optional_in;
};

class UnionCheck {
 public:
  explicit UnionCheck(const SchemaJson& root)
      : root_(root), types_(root), matches_(root, SchemaTypes::Of::kMatches) {}

  // Checks that no output can match two of the branches in schema["oneOf"], a non-empty array. They can
  // differ by a tag (a property whose values are constants), by their types, by their constants, or because
  // each requires a property that the other does not have. kInvalidArgument names two branches that may
  // overlap. The work for all unions of a schema is bounded.
  Result<UnionTag> check(const SchemaJson& schema, const std::string& path);

 private:
  using Values = std::set<std::string>;  // constants as JSON text
  struct Branch {
    unsigned types = kAllTypes;    // of its outputs
    unsigned matches = kAllTypes;  // of the values that match it
    std::optional<Values> constants;
    const SchemaJson* object = nullptr;  // its properties are the only ones of its outputs
  };

  std::optional<UnionTag> find_tag(const SchemaJson& schema);
  std::vector<std::string> possible_tags(const SchemaJson& schema);
  std::optional<Values> tags_of(const SchemaJson& branch, UnionTag& tag, int depth);
  std::optional<Values> constants_of(const SchemaJson& schema);
  bool has_distinct_constants(const SchemaJson& branches);
  bool requires_property(const SchemaJson& object, const std::string& name);
  Branch branch_of(const SchemaJson& schema);
  bool are_disjoint(const Branch& a, const Branch& b);
  bool requires_what_is_missing(const SchemaJson& a, const SchemaJson& b);
  static bool share_a_constant(const Values& a, const Values& b);
  static bool differ(const std::optional<Values>& a, const std::optional<Values>& b);
  bool spend(size_t steps);  // false: the check has taken too many

  const SchemaJson& root_;
  SchemaTypes types_;
  SchemaTypes matches_;
  int64_t steps_ = 0;
};

}  // namespace fp4moe
