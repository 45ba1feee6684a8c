#include "engine/grammar/grammar_text.h"

#include <gtest/gtest.h>

#include <string>

namespace fp4moe {
namespace {

using Kind = GrammarSpec::Kind;

std::string schema_error(const std::string& schema) {
  const Status status = check_grammar_text({Kind::kJsonSchema, schema});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << schema;
  return status.message();
}

void expect_names(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
}

TEST(GrammarText, CountsAreNotNegative) {
  for (const std::string key : {"minLength", "maxLength", "minItems", "maxItems", "minProperties",
                                "maxProperties", "minContains", "maxContains"})
    for (const std::string value : {"-1", "1.5", "\"3\"", "null", "[1]"})
      expect_names(schema_error(R"({"type":"object","properties":{"a":{")" + key + "\":" + value + "}}}"),
                   {key.c_str(), "/properties/a", "integer of at least 0"});
}

TEST(GrammarText, ABoundIsANumber) {
  for (const std::string key : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
    expect_names(schema_error(R"({"type":"integer",")" + key + "\":\"7\"}"), {key.c_str(), "7", "number"});
  expect_names(schema_error(R"({"multipleOf":0})"), {"multipleOf 0", "above 0"});
}

TEST(GrammarText, AMinimumIsNotAboveItsMaximum) {
  expect_names(schema_error(R"({"minLength":4,"maxLength":3})"), {"minLength 4", "at most maxLength 3"});
  expect_names(schema_error(R"({"minItems":4,"maxItems":3})"), {"minItems 4", "at most maxItems 3"});
  expect_names(schema_error(R"({"minProperties":4,"maxProperties":3})"),
               {"minProperties 4", "maxProperties 3"});
  expect_names(schema_error(R"({"minimum":4.5,"maximum":3})"), {"minimum 4.5", "at most maximum 3"});
  expect_names(schema_error(R"({"minimum":3,"exclusiveMaximum":3})"),
               {"minimum 3", "less than exclusiveMaximum 3"});
  expect_names(schema_error(R"({"anyOf":[{"minimum":2,"maximum":1}]})"), {"/anyOf/0"});
  EXPECT_TRUE(
      check_grammar_text({Kind::kJsonSchema, R"({"minLength":3,"maxLength":3,"minimum":-2,"maximum":-2})"})
          .ok());
}

TEST(GrammarText, ARefLeadsSomewhere) {
  expect_names(schema_error(R"({"$ref":"#"})"), {"$ref \"#\"", "describes no value"});
  expect_names(
      schema_error(R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}})"),
      {"describes no value"});
  // A list of lists is a value: [] or [[], []].
  EXPECT_TRUE(check_grammar_text({Kind::kJsonSchema, R"({"type":"array","items":{"$ref":"#"}})"}).ok());
  EXPECT_TRUE(
      check_grammar_text({Kind::kJsonSchema, R"({"$ref":"#/$defs/a","$defs":{"a":{"type":"null"}}})"}).ok());
}

TEST(GrammarText, NamesAndValuesAreNotKeywords) {
  for (const std::string schema :
       {R"({"type":"object","properties":{"maxLength":{"type":"integer"},"minItems":true}})",
        R"({"const":{"maxLength":-1}})", R"({"enum":[{"minItems":-1}]})", R"({"default":{"$ref":"#"}})", "{",
        "[]", "7"})
    EXPECT_TRUE(check_grammar_text({Kind::kJsonSchema, schema}).ok()) << schema;
}

TEST(GrammarText, SchemasOfStructuralTagsAreChecked) {
  const std::string tag =
      R"({"type":"structural_tag","format":{"type":"json_schema","json_schema":{"type":"string","maxLength":-1}}})";
  const Status status = check_grammar_text({Kind::kStructuralTag, tag});
  expect_names(status.message(), {"maxLength", "at least 0"});
}

TEST(GrammarText, BracketsNestOnlySoDeep) {
  for (const Kind kind : {Kind::kRegex, Kind::kEbnf, Kind::kJsonSchema, Kind::kStructuralTag})
    expect_names(check_grammar_text({kind, std::string(100000, '[')}).message(), {"deeper than 256"});
}

TEST(GrammarText, NamesTheCostliestPart) {
  expect_names(costliest_part({Kind::kRegex, "a{3}|x((.{0,20}){0,90})y"}), {"\"(.{0,20}){0,90}\"", "nest"});
  expect_names(costliest_part({Kind::kRegex, "[a-z({]{5}\\({1,5000}"}), {"\"\\({1,5000}\"", "large count"});
  expect_names(costliest_part({Kind::kEbnf, "root ::= \"({9999}\" [a]{2} (\"b\" \"c\"{0,99}){0,99}"}),
               {"{0,99}){0,99}"});
  expect_names(costliest_part({Kind::kJsonSchema,
                               R"({"properties":{"p":{"type":"string","pattern":"^(.{0,99}){0,99}$"}}})"}),
               {"(.{0,99}){0,99}"});
  expect_names(costliest_part({Kind::kJsonSchema, R"({"properties":{"p":{"maxLength":50000}}})"}),
               {"maxLength 50000", "/properties/p"});
  std::string properties;
  for (int i = 0; i < 300; ++i) properties += (i == 0 ? "\"p" : ",\"p") + std::to_string(i) + "\":{}";
  expect_names(
      costliest_part({Kind::kJsonSchema, R"({"required":["p1"],"properties":{)" + properties + "}}"}),
      {"300 properties", "1 are required"});
  expect_names(costliest_part({Kind::kStructuralTag, R"({"format":{"type":"regex","pattern":"a{7000}"}})"}),
               {"a{7000}"});
  EXPECT_EQ(costliest_part({Kind::kRegex, "(a{1,3}){2}"}), "");
}

// Messages quote text that clients send.
TEST(GrammarText, MessagesArePrintableAndShort) {
  const std::string hostile = "\x1b[31m\n" + std::string(5000, 'x');
  for (const std::string& text :
       {costliest_part({Kind::kRegex, "(" + hostile + "){2000}"}),
        schema_error(R"({"properties":{")" + std::string(5000, 'p') + R"(":{"maxLength":-1}}})")}) {
    EXPECT_LT(text.size(), 400u);
    for (const char c : text) EXPECT_TRUE(c >= ' ' && c <= '~') << static_cast<int>(c);
  }
}

}  // namespace
}  // namespace fp4moe
