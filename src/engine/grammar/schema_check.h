// What xgrammar can enforce of a JSON schema. It skips keywords that it does not know, or that stand next to
// others, so everything that it would skip is refused here by name.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/grammar/json_schema.h"
#include "engine/grammar/schema_unions.h"

namespace fp4moe {

// A change to one schema object, with which xgrammar enforces its meaning.
struct SchemaEdit {
  std::map<std::string, std::string> renamed;                         // keyword -> name; "" removes it
  std::set<std::string> required;                                     // names added to "required"
  std::vector<std::pair<std::string, const SchemaJson*>> properties;  // members added to "properties"
  std::vector<std::pair<std::string, SchemaJson>> added;              // members set
};

class SchemaCheck {
 public:
  // Borrows the schema. `path` is the schema's place in messages.
  SchemaCheck(const SchemaJson& root, std::string path)
      : root_(root), path_(std::move(path)), types_(root), unions_(root) {}

  // kInvalidArgument: a part of the schema is malformed, matches nothing, or cannot be enforced. The message
  // has the JSON path of the keyword, the reason, and what to use instead.
  Status check();

  // The schema for xgrammar, after check() has succeeded. Its texts match the given schema:
  //   oneOf with disjoint branches becomes anyOf, and the branches require their tag;
  //   names in "required" that additionalProperties describes become properties;
  //   an array without keywords for its items gets "items": {};
  //   a list under "items" (drafts before 2020-12) becomes prefixItems;
  //   "x-members" makes xgrammar tell apart schemas whose properties differ only in their order, or in
  //   properties named like annotations ("title", "default", ...).
  SchemaJson rewritten() const { return rewrite(root_); }

 private:
  Status check_one(const SchemaJson& schema, const std::string& path);
  Status check_ref(const SchemaJson& schema, const std::string& path);
  Status check_constants(const SchemaJson& schema, const std::string& path, const std::string& keyword);
  Status check_branches(const SchemaJson& schema, const std::string& path, const std::string& keyword);
  Status check_siblings(const SchemaJson& schema, const std::string& path, const std::string& keyword);
  Status check_unions(const SchemaJson& schema, const std::string& path);
  Status check_typed(const SchemaJson& schema, const std::string& path);
  Status check_string(const SchemaJson& schema, const std::string& path);
  Status check_lengths(const SchemaJson& schema, const std::string& path, const std::string& format);
  Status check_array(const SchemaJson& schema, const std::string& path);
  Status check_prefix(const SchemaJson& schema, const std::string& path, const std::string& keyword);
  Status check_object(const SchemaJson& schema, const std::string& path);
  Status check_num_properties(const SchemaJson& schema, const std::string& path);
  Status check_required(const SchemaJson& schema, const std::string& path);
  Status check_names(const SchemaJson& schema, const std::string& path);
  Status check_name_patterns(const SchemaJson& schema, const std::string& path);
  void tell_apart(const SchemaJson& schema);
  SchemaJson rewrite(const SchemaJson& value) const;
  SchemaJson rewrite_object(const SchemaJson& value, const SchemaEdit& edit) const;

  const SchemaJson& root_;
  const std::string path_;
  SchemaTypes types_;
  UnionCheck unions_;
  std::map<const SchemaJson*, SchemaEdit> edits_;
  std::set<const SchemaJson*> name_schemas_;  // under propertyNames: their values are strings
  std::set<std::string> followed_;            // references whose chains end
};

}  // namespace fp4moe
