#include "server/chat/grammar_fields.h"

#include <utility>

namespace fp4moe {

namespace {

// Returns the text of a JSON schema, given as an object or as text. Fails if it is malformed or too deep.
std::string schema_text(Fields& fields, const std::string& name, const json& given) {
  json schema = given;
  if (given.is_string()) {
    Result<json> parsed = parse_json(given.get<std::string>());
    if (!parsed.ok()) fields.fail(name, parsed.status());
    schema = parsed.ok() ? std::move(parsed).value() : json();
  }
  if (fields.ok() && !schema.is_object() && !schema.is_boolean())
    fields.fail(name, std::string("must be a JSON Schema, not ") + schema.type_name());
  return to_text(schema);
}

void set(const Engine& engine, Fields& fields, const std::string& name, GrammarSpec& grammar,
         GrammarSpec::Kind kind, std::string text) {
  if (!engine.info().has_grammars)
    fields.fail(name, unsupported("needs a grammar backend, but this server has none (see --grammar-backend; "
                                  "a build without xgrammar has none)"));
  if (grammar.kind != GrammarSpec::Kind::kNone)
    fields.fail(name, "cannot be combined with another constraint on the output text");
  grammar = {kind, std::move(text)};
}

}  // namespace

GrammarSpec read_grammar(const Engine& engine, Fields& fields) {
  GrammarSpec grammar;
  if (const json* schema = fields.find("json_schema"))
    set(engine, fields, "json_schema", grammar, GrammarSpec::Kind::kJsonSchema,
        schema_text(fields, "json_schema", *schema));
  for (const auto& [name, kind] :
       {std::pair{"regex", GrammarSpec::Kind::kRegex}, {"ebnf", GrammarSpec::Kind::kEbnf}}) {
    if (fields.find(name) == nullptr) continue;
    set(engine, fields, name, grammar, kind, fields.string(name, ""));
    if (grammar.text.empty()) fields.fail(name, "is empty");
  }
  if (const json* tag = fields.find("structural_tag"))
    set(engine, fields, "structural_tag", grammar, GrammarSpec::Kind::kStructuralTag,
        schema_text(fields, "structural_tag", *tag));
  return grammar;
}

void read_response_format(const Engine& engine, Fields& fields, GrammarSpec& grammar) {
  const std::string name = "response_format";
  const json* format = fields.find(name);
  if (format == nullptr) return;
  Fields inner(*format, name + ".");
  const std::string type = inner.string("type", "");
  if (type == "json_object") {
    set(engine, fields, name, grammar, GrammarSpec::Kind::kJsonSchema, R"({"type":"object"})");
  } else if (type == "json_schema") {
    const json* wrapper = inner.find("json_schema");
    const json none = json::object();
    Fields named(wrapper == nullptr ? none : *wrapper, name + ".json_schema.");
    for (const char* moot : {"name", "description", "strict"})
      named.find(moot);  // ignored: schemas are always enforced
    const json* schema = named.find("schema");
    if (schema == nullptr)
      named.fail("schema", "is missing");
    else
      set(engine, fields, name, grammar, GrammarSpec::Kind::kJsonSchema,
          schema_text(named, "schema", *schema));
    inner.merge(named);
  } else if (type == "structural_tag") {
    for (const char* part : {"format", "structures", "triggers"}) inner.find(part);
    set(engine, fields, name, grammar, GrammarSpec::Kind::kStructuralTag, to_text(*format));
  } else if (type != "text") {
    inner.fail("type", "must be \"text\", \"json_object\", \"json_schema\" or \"structural_tag\", got " +
                           to_text(type).substr(0, 80));
  }
  fields.merge(inner);
}

json json_schema_format(json schema) { return {{"type", "json_schema"}, {"json_schema", std::move(schema)}}; }

json structural_format(const GrammarSpec& grammar) {
  if (grammar.kind == GrammarSpec::Kind::kRegex) return {{"type", "regex"}, {"pattern", grammar.text}};
  if (grammar.kind == GrammarSpec::Kind::kEbnf) return {{"type", "grammar"}, {"grammar", grammar.text}};
  return json_schema_format(json::parse(grammar.text));
}

GrammarSpec structural_tag(json format) {
  return {GrammarSpec::Kind::kStructuralTag,
          to_text({{"type", "structural_tag"}, {"format", std::move(format)}})};
}

}  // namespace fp4moe
