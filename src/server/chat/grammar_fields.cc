#include "server/chat/grammar_fields.h"

#include <span>
#include <utility>

namespace fp4moe {

namespace {

constexpr const char* kAnyObject = R"({"type":"object"})";

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

// A field that holds a grammar.
struct Row {
  const char* name;
  GrammarSpec::Kind kind;
};
// SGLang's fields, vLLM's older ones, and llama-server's "grammar" (GBNF, which is this EBNF).
constexpr Row kTopLevel[] = {
    {"json_schema", GrammarSpec::Kind::kJsonSchema},
    {"regex", GrammarSpec::Kind::kRegex},
    {"ebnf", GrammarSpec::Kind::kEbnf},
    {"structural_tag", GrammarSpec::Kind::kStructuralTag},
    {"guided_json", GrammarSpec::Kind::kJsonSchema},
    {"guided_regex", GrammarSpec::Kind::kRegex},
    {"guided_grammar", GrammarSpec::Kind::kEbnf},
    {"grammar", GrammarSpec::Kind::kEbnf},
};
// vLLM's "structured_outputs".
constexpr Row kStructuredOutputs[] = {
    {"json", GrammarSpec::Kind::kJsonSchema},
    {"regex", GrammarSpec::Kind::kRegex},
    {"grammar", GrammarSpec::Kind::kEbnf},
    {"structural_tag", GrammarSpec::Kind::kStructuralTag},
};

// One of the older form's "structures".
json read_structure(Fields& tag, const json& structure, const std::string& name) {
  Fields inner(structure, name + ".");
  const std::string begin = inner.string("begin", ""), end = inner.string("end", "");
  const json* schema = inner.find("schema");
  const json given = schema == nullptr ? json() : *schema;
  if (!given.is_object() && !given.is_boolean())
    inner.fail("schema", std::string("must be a JSON Schema, not ") + given.type_name());
  if (begin.empty()) inner.fail("begin", "is missing");
  tag.merge(inner);
  return {{"type", "tag"},
          {"begin", begin},
          {"content", json_schema_format(given, name + ".schema")},
          {"end", end}};
}

// Returns the text of a structural tag. SGLang's older form {"structures": [{"begin", "schema", "end"}],
// "triggers": [...]} is translated into the present one, {"format": {"type": "triggered_tags", ...}}.
std::string tag_text(Fields& fields, const std::string& name, const json& given) {
  const std::string text = schema_text(fields, name, given);
  if (!fields.ok()) return text;
  const json tag = json::parse(text);
  if (!tag.is_object() || tag.contains("format")) return text;
  Fields inner(tag, fields.prefix() + name + ".");
  const json* structures = inner.find("structures");
  const std::vector<std::string> triggers = inner.strings("triggers");
  json tags = json::array();
  if (structures == nullptr) {
    inner.fail("format",
               "is missing: send xgrammar's \"format\", or SGLang's older \"structures\" and \"triggers\"");
  } else if (!structures->is_array() || structures->empty()) {
    inner.fail("structures", "must be a non-empty array of {\"begin\", \"schema\", \"end\"}");
  } else {
    for (size_t i = 0; i < structures->size() && inner.ok(); ++i)
      tags.push_back(
          read_structure(inner, (*structures)[i], inner.prefix() + "structures[" + std::to_string(i) + "]"));
    if (triggers.empty()) inner.fail("triggers", "must have at least one string");
  }
  fields.merge_error(inner);
  return structural_tag({{"type", "triggered_tags"}, {"triggers", triggers}, {"tags", std::move(tags)}}).text;
}

void read_rows(const Engine& engine, Fields& fields, std::span<const Row> rows, GrammarSpec& grammar) {
  for (const auto& [name, kind] : rows) {
    const json* value = fields.find(name);
    if (value == nullptr) continue;
    const bool is_text = kind == GrammarSpec::Kind::kRegex || kind == GrammarSpec::Kind::kEbnf;
    const bool is_tag = kind == GrammarSpec::Kind::kStructuralTag;
    const std::string text = is_text  ? fields.string(name, "")
                             : is_tag ? tag_text(fields, name, *value)
                                      : schema_text(fields, name, *value);
    set(engine, fields, name, grammar, kind, text);
    if (text.empty()) fields.fail(name, "is empty");
  }
}

// `text` as a string literal of EBNF.
std::string quoted(const std::string& text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string literal = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      literal += {'\\', c};
    } else if (byte < 0x20 || byte == 0x7f) {
      literal += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      literal += c;
    }
  }
  return literal + "\"";
}

// Reads field `name`, a list of texts, and constrains the output to one of them.
void read_choice(const Engine& engine, Fields& fields, const std::string& name, GrammarSpec& grammar) {
  const json* given = fields.find(name);
  if (given == nullptr) return;
  const std::vector<std::string> texts = fields.strings(name);
  if (!given->is_array() || texts.empty()) return fields.fail(name, "must be a non-empty array of strings");
  std::string rule = "root ::= ";
  for (size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].empty()) return fields.fail(name, "contains an empty string");
    rule += (i > 0 ? " | " : "") + quoted(texts[i]);
  }
  set(engine, fields, name, grammar, GrammarSpec::Kind::kEbnf, std::move(rule));
}

// The schema of a response format: {"json_schema": {"schema"}}, or llama-server's {"schema"}.
std::string named_schema(Fields& format) {
  if (const json* schema = format.find("schema")) return schema_text(format, "schema", *schema);
  const json* wrapper = format.find("json_schema");
  const json none = json::object();
  Fields named(wrapper == nullptr ? none : *wrapper, "response_format.json_schema.");
  for (const char* moot : {"name", "description", "strict"})
    named.find(moot);  // ignored: schemas are always enforced
  const json* schema = named.find("schema");
  if (schema == nullptr) named.fail("schema", "is missing");
  std::string text = schema == nullptr ? "" : schema_text(named, "schema", *schema);
  format.merge(named);
  return text;
}

}  // namespace

GrammarSpec read_grammar(const Engine& engine, Fields& fields) {
  GrammarSpec grammar;
  read_rows(engine, fields, kTopLevel, grammar);
  read_choice(engine, fields, "guided_choice", grammar);
  fields.refuse("guided_whitespace_pattern", nullptr);
  const json* outputs = fields.find("structured_outputs");
  if (outputs == nullptr) return grammar;
  Fields inner(*outputs, "structured_outputs.");
  read_rows(engine, inner, kStructuredOutputs, grammar);
  read_choice(engine, inner, "choice", grammar);
  if (inner.boolean("json_object", false))
    set(engine, inner, "json_object", grammar, GrammarSpec::Kind::kJsonSchema, kAnyObject);
  inner.find("disable_fallback");  // this server never falls back to another backend
  inner.refuse("disable_any_whitespace", true);
  inner.refuse("disable_additional_properties", false);
  inner.refuse("whitespace_pattern", nullptr);
  fields.merge(inner);
  return grammar;
}

void read_response_format(const Engine& engine, Fields& fields, GrammarSpec& grammar) {
  const std::string name = "response_format";
  const json* format = fields.find(name);
  if (format == nullptr) return;
  Fields inner(*format, name + ".");
  const std::string type = inner.string("type", "");
  if (type == "json_object") {
    const json* schema = inner.find("schema");  // llama-server's
    set(engine, fields, name, grammar, GrammarSpec::Kind::kJsonSchema,
        schema == nullptr ? kAnyObject : schema_text(inner, "schema", *schema));
  } else if (type == "json_schema") {
    set(engine, fields, name, grammar, GrammarSpec::Kind::kJsonSchema, named_schema(inner));
  } else if (type == "structural_tag") {
    for (const char* part : {"format", "structures", "triggers"}) inner.find(part);
    set(engine, fields, name, grammar, GrammarSpec::Kind::kStructuralTag, tag_text(fields, name, *format));
  } else if (type != "text") {
    inner.fail("type", "must be \"text\", \"json_object\", \"json_schema\" or \"structural_tag\", got " +
                           shown(type));
  }
  fields.merge(inner);
}

json json_schema_format(json schema, const std::string& place) {
  return {{"type", "json_schema"}, {"json_schema", std::move(schema)}, {GrammarSpec::kSchemaPlace, place}};
}

json structural_format(const GrammarSpec& grammar) {
  if (grammar.kind == GrammarSpec::Kind::kRegex) return {{"type", "regex"}, {"pattern", grammar.text}};
  if (grammar.kind == GrammarSpec::Kind::kEbnf) return {{"type", "grammar"}, {"grammar", grammar.text}};
  return json_schema_format(json::parse(grammar.text), "$");
}

GrammarSpec structural_tag(json format) {
  return {GrammarSpec::Kind::kStructuralTag,
          to_text({{"type", "structural_tag"}, {"format", std::move(format)}})};
}

}  // namespace fp4moe
