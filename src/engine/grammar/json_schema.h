// Reading JSON schemas: paths for messages, references, and the schemas that a value of a schema can reach.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

using SchemaJson = nlohmann::ordered_json;  // outputs have their properties in the schema's order

// Printable and short, in quotes: messages quote text that clients send.
std::string in_quotes(std::string_view text);

// JSON paths such as $.properties.items.oneOf[1], printable.
std::string member_path(const std::string& path, std::string_view name);
std::string element_path(const std::string& path, size_t index);

// The end of a path of at most 200 bytes, for messages.
std::string short_path(const std::string& path);

// An error about a schema's keyword: its path, its value if that is short, and the reason.
Status schema_error(const std::string& path, const std::string& keyword, const SchemaJson& schema,
                    const std::string& reason);

// Whether the name is a keyword of JSON Schema that limits the values of a schema. Annotations ("title",
// "default", ...) and names that JSON Schema does not define are not.
bool is_assertion(std::string_view keyword);

// The member, or null if the value is not an object or has none.
const SchemaJson* member(const SchemaJson& value, const std::string& name);

// The target of a "$ref" such as "#/$defs/Node", or null: it points into another document or into an array,
// has an escaped name, the target does not exist, or it is not a schema.
const SchemaJson* resolve_ref(const SchemaJson& root, const std::string& ref);

// Follows "$ref"s (at most 16) to the schema that limits the value; null if one leads nowhere.
const SchemaJson* follow_refs(const SchemaJson& root, const SchemaJson& schema);

// JSON types as bits; a number is an integer or a fraction.
enum JsonTypes : unsigned {
  kNullType = 1,
  kBooleanType = 2,
  kObjectType = 4,
  kArrayType = 8,
  kStringType = 16,
  kIntegerType = 32,
  kFractionType = 64,
  kAllTypes = 127,
};

// The types of a schema's values: those of its "type", of its constants, or of all its branches. Never too
// few; all types for schemas that do not limit them, that are unions of themselves, or that lead through more
// than 64 references and unions.
class SchemaTypes {
 public:
  // kOutputs: without a "type", properties give objects and items give arrays, which are the only values that
  // xgrammar generates. kMatches: such a schema also matches all other types.
  enum class Of { kOutputs, kMatches };
  explicit SchemaTypes(const SchemaJson& root, Of of = Of::kOutputs) : root_(root), of_(of) {}
  unsigned of(const SchemaJson& schema) { return within(schema, 0); }

 private:
  unsigned within(const SchemaJson& schema, int depth);
  unsigned evaluate(const SchemaJson& schema, int depth);

  const SchemaJson& root_;
  const Of of_;
  std::map<const SchemaJson*, unsigned> known_;  // each schema is evaluated once
};

// The types of the keyword "type" alone; all types without one, and 0 if it is malformed.
unsigned declared_types(const SchemaJson& schema);

// Calls visit(schema, path) once for the root and every schema that a value of the root can reach, also
// through references, until a call returns an error. Other schemas of "$defs" do not matter.
using SchemaVisit = std::function<Status(const SchemaJson& schema, const std::string& path)>;
Status walk_schema(const SchemaJson& root, const std::string& path, const SchemaVisit& visit);

}  // namespace fp4moe
