#include "engine/grammar/grammar_text.h"

#include <gtest/gtest.h>

#include <string>

#include "engine/grammar/json_schema.h"

namespace fp4moe {
namespace {

using Kind = GrammarSpec::Kind;
using Json = SchemaJson;

std::string schema_error(const std::string& schema) {
  const Result<std::string> text = enforced_text({Kind::kJsonSchema, schema});
  EXPECT_EQ(text.status().code(), StatusCode::kInvalidArgument) << schema;
  return text.ok() ? "" : text.status().message();
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
                   {("$.properties.a." + key + " ").c_str(), "integer of at least 0"});
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
  expect_names(schema_error(R"({"anyOf":[{"minimum":2,"maximum":1}]})"), {"$.anyOf[0].minimum 2"});
  EXPECT_TRUE(enforced_text(
                  {Kind::kJsonSchema,
                   R"({"type":["string","integer"],"minLength":3,"maxLength":3,"minimum":-2,"maximum":-2})"})
                  .ok());
}

TEST(GrammarText, ARefLeadsSomewhere) {
  expect_names(schema_error(R"({"$ref":"#"})"), {"$ref \"#\"", "describes no value"});
  expect_names(
      schema_error(R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}})"),
      {"describes no value"});
  // A list of lists is a value: [] or [[], []].
  EXPECT_TRUE(enforced_text({Kind::kJsonSchema, R"({"type":"array","items":{"$ref":"#"}})"}).ok());
  EXPECT_TRUE(
      enforced_text({Kind::kJsonSchema, R"({"$ref":"#/$defs/a","$defs":{"a":{"type":"null"}}})"}).ok());
}

TEST(GrammarText, NamesAndValuesAreNotKeywords) {
  for (const std::string schema :
       {R"({"type":"object","properties":{"maxLength":{"type":"integer"},"minItems":true}})",
        R"({"const":{"maxLength":-1}})", R"({"enum":[{"minItems":-1}]})", R"({"default":{"$ref":"#"}})", "{}",
        "true"})
    EXPECT_TRUE(enforced_text({Kind::kJsonSchema, schema}).ok()) << schema;
}

std::string enforced(const std::string& schema) {
  const Result<std::string> text = enforced_text({Kind::kJsonSchema, schema});
  EXPECT_TRUE(text.ok()) << text.status().to_string();
  return text.ok() ? *text : "";
}

// Pydantic's discriminated unions: the tag has a default, so it is not required.
TEST(GrammarText, BranchesOfOneOfRequireTheirTag) {
  const std::string text = enforced(
      R"({"oneOf":[{"$ref":"#/$defs/A"},{"$ref":"#/$defs/B"}],"discriminator":{"propertyName":"k"},"$defs":{)"
      R"("A":{"type":"object","properties":{"k":{"const":"a","default":"a"}}},)"
      R"("B":{"type":"object","properties":{"k":{"enum":["b","c"]}},"required":["k"]}}})");
  expect_names(text, {R"({"anyOf":[{"$ref")", R"("default":"a"}},"required":["k"])"});
}

TEST(GrammarText, BranchesOfOneOfDiffer) {
  const std::string a = R"({"type":"object","properties":{"a":{}},"required":["a"]})";
  const std::string b = R"({"type":"object","properties":{"b":{}},"required":["b"]})";
  for (const std::string& other : {std::string(R"({"type":"null"})"), std::string(R"({"const":3})"), b})
    enforced(R"({"oneOf":[)" + a + "," + other + "]}");
  for (const std::string& other : {a, std::string("{}"), std::string(R"({"type":"object"})")})
    expect_names(schema_error(R"({"properties":{"p":{"oneOf":[)" + a + "," + other + "]}}}"),
                 {"$.properties.p.oneOf: ", "branches [0] and [1]", "anyOf"});
  expect_names(schema_error(R"({"oneOf":[{"const":1},{"const":1.0}]})"), {"$.oneOf: "});
  // Without a type, every string matches the first branch too.
  expect_names(schema_error(R"({"oneOf":[{"properties":{"a":{}}},{"type":"string"}]})"), {"$.oneOf: "});
}

TEST(GrammarText, ManyBranchesAreComparedQuickly) {
  std::string names, branches, unions;
  for (int i = 0; i < 3000; ++i) names += (i == 0 ? "\"p" : ",\"p") + std::to_string(i) + "\"";
  for (int i = 0; i < 6000; ++i) branches += std::string(i == 0 ? "" : ",") + R"({"$ref":"#/$defs/D"})";
  for (int i = 0; i < 12; ++i) {
    const std::string next = "{\"$ref\":\"#/$defs/U" + std::to_string(i + 1) + "\"}";
    unions += ",\"U" + std::to_string(i) + "\":{\"oneOf\":[" + next + "," + next + "]}";
  }
  const std::string object =
      R"({"type":"object","properties":{"p0":{"const":1}},"required":[)" + names + "]}";
  schema_error(R"({"oneOf":[)" + branches + R"(],"$defs":{"D":)" + object + "}}");
  schema_error(R"({"$ref":"#/$defs/U0","$defs":{"U12":)" + object + unions + "}}");
}

// xgrammar's comparison of schemas ignores these names, also as names of properties.
TEST(GrammarText, PropertiesNamedLikeAnnotationsDiffer) {
  const std::string text = enforced(
      R"({"type":"object","properties":{"a":{"type":"object","properties":{"title":{"type":"string"}}},)"
      R"("b":{"type":"object","properties":{"title":{"type":"integer"}}}}})");
  const size_t first = text.find("x-members"), second = text.find("x-members", first + 1);
  EXPECT_NE(text.substr(first, 35), text.substr(second, 35));
}

TEST(GrammarText, TheSchemaIsRewrittenWithTheSameMeaning) {
  expect_names(enforced(R"({"type":"array","items":[{"type":"null"}],"additionalItems":false})"),
               {R"("prefixItems":[{"type":"null"}],"items":false)"});
  expect_names(
      enforced(R"({"type":"object","properties":{},"required":["b"],"additionalProperties":{"const":1}})"),
      {R"("properties":{"b":{"const":1)"});
  expect_names(enforced(R"({"type":"string","pattern":"^\u00e9$"})"), {R"(^\\u{e9}$)"});
  expect_names(enforced(R"({"type":"string","format":"uri","minLength":1})"),
               {R"({"type":"string","format":"uri"})"});
}

TEST(GrammarText, RefusalsNameThePath) {
  const auto refused = [](const std::string& inner, std::initializer_list<const char*> parts) {
    expect_names(
        schema_error(R"({"type":"object","properties":{"a b":{"type":"array","items":)" + inner + "}}}"),
        parts);
  };
  refused(R"({"anyOf":[{"type":"null"},{"type":"number","multipleOf":0.5}]})",
          {"$.properties[\"a b\"].items.anyOf[1].multipleOf 0.5", "\"type\": \"integer\""});
  refused(R"({"type":"string","pattern":"a(?=b)c"})",
          {".items.pattern \"a(?=b)c\"", "looks ahead", "with |"});
  refused(R"({"not":{}})", {".items.not ", "enum or anyOf"});
  refused(R"({"minimum":1})", {".items.minimum 1", "add \"type\""});
  refused(R"({"$ref":"#/$defs/X"})", {".items.$ref \"#/$defs/X\"", "#/$defs/NAME"});
  refused(R"({"type":"object","required":["x"]})", {".items.required names \"x\"", "add it to properties"});
  expect_names(schema_error(R"({"$ref":"#/$defs/T","$defs":{"T":{"type":"integer","maximum":1.5}}})"),
               {"$.$defs.T.maximum 1.5"});
}

// A schema that no value can reach does not matter.
TEST(GrammarText, UnusedDefinitionsAreIgnored) { enforced(R"({"type":"null","$defs":{"T":{"not":{}}}})"); }

TEST(GrammarText, TextThatIsNotASchemaIsRefused) {
  expect_names(schema_error("{"), {"not valid JSON"});
  expect_names(schema_error("[]"), {"must be an object, not array"});
  expect_names(schema_error("false"), {"matches no value"});
}

TEST(GrammarText, SchemasOfStructuralTagsAreChecked) {
  const std::string tag =
      R"({"type":"structural_tag","format":{"type":"json_schema","json_schema":{"type":"string","maxLength":-1}}})";
  expect_names(enforced_text({Kind::kStructuralTag, tag}).status().message(),
               {"$.format.json_schema.maxLength -1", "at least 0"});
}

TEST(GrammarText, ErrorsOfATagNameTheGivenPlaceOfTheSchema) {
  const auto tag = [](const std::string& schema, const std::string& place) {
    return GrammarSpec{
        Kind::kStructuralTag,
        R"({"type":"structural_tag","format":{"type":"sequence","elements":[{"type":"json_schema",)"
        R"("schema_place":)" +
            place + R"(,"json_schema":)" + schema + "}]}}"};
  };
  expect_names(enforced_text(tag(R"({"type":"string","maxLength":-1})", R"("tools[3].function.parameters")"))
                   .status()
                   .message(),
               {"tools[3].function.parameters.maxLength -1", "at least 0"});
  for (const char* none : {R"("")", "7", "null"})
    expect_names(enforced_text(tag(R"({"type":"string","maxLength":-1})", none)).status().message(),
                 {"$.format.elements[0].json_schema.maxLength -1"});
  const Result<std::string> text = enforced_text(tag(R"({"type":"null"})", R"("here")"));
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(text->find("schema_place"), std::string::npos) << *text;
  EXPECT_NE(costliest_part(tag(R"({"type":"string","maxLength":90000})", R"("here")")).find("here.maxLength"),
            std::string::npos);
}

TEST(GrammarText, RegularExpressionsAreCheckedInTheWordsOfPatterns) {
  const auto error = [](const std::string& text) {
    return enforced_text({Kind::kRegex, text}).status().message();
  };
  for (const auto& [text, words] : {std::pair{"a(b", "has a ( without )"},
                                    {"a)", "has a ) without ("},
                                    {"[z-a]", "range in [] whose end is"},
                                    {"a{3,1}", "with m at most n"},
                                    {"*a", "repetition of nothing"},
                                    {"(?=a)b", "looks ahead or behind"},
                                    {"\\1", "back-reference"},
                                    {"a\\bc", "has \\b, which cannot be enforced"},
                                    {"\\q", "means nothing"},
                                    {"[a", "[ without ]"},
                                    {"a$|b", "has $ before its end"},
                                    {"\\p{L}", "has \\p"},
                                    {"\\ud83d", "has \\ud83d, which is no Unicode character"},
                                    {"[a-\\udfff]", "has \\udfff, which is no Unicode character"},
                                    {"\\ude00\\ud83d", "has \\ude00, which is no Unicode character"},
                                    {"\\u{d800}", "which is no Unicode character"},
                                    {"\\u{110000}", "which is no Unicode character"},
                                    {"\\u{123456789}", "which is no Unicode character"},
                                    {"\\", "ends with a backslash"}})
    expect_names(error(text), {"the regular expression", text, words});
  // Text that a JSON string would have to escape is allowed here.
  for (const char* text : {"\"[a-z]+\"", "a\\\\b", "x\ny", "(yes|no)\\n{0,2}", "[\"\\\\\n]", "^a.*$",
                           "(?:a|b)+?", "[\xc3\xa0-\xc3\xa9]+"})
    EXPECT_EQ(error(text), "") << text;
  expect_names(enforced_text({Kind::kStructuralTag, R"({"format":{"type":"regex","pattern":"\\ud83d"}})"})
                   .status()
                   .message(),
               {"no Unicode character"});
}

TEST(GrammarText, EscapedSurrogatesAreJoined) {
  const std::string pair = R"(\ud83d\ude00)", joined = R"(\u{1f600})";
  EXPECT_EQ(*enforced_text({Kind::kRegex, "[" + pair + "a]{2}"}), "[" + joined + "a]{2}");
  // A doubled backslash is a character, and the text behind it no escape.
  EXPECT_EQ(*enforced_text({Kind::kRegex, R"(\\ud83d\u{10ffff}\ud7ff\uE000)"}),
            R"(\\ud83d\u{10ffff}\ud7ff\uE000)");
  const Json tag = Json::parse(*enforced_text(
      {Kind::kStructuralTag, Json{{"format", {{"type", "regex"}, {"pattern", pair}}}}.dump()}));
  EXPECT_EQ(tag["format"]["pattern"], joined);
  const Json schema =
      Json::parse(*enforced_text({Kind::kJsonSchema, Json{{"type", "string"}, {"pattern", pair}}.dump()}));
  EXPECT_NE(schema.dump().find("1f600"), std::string::npos) << schema;
  EXPECT_EQ(schema.dump().find("d83d"), std::string::npos) << schema;
}

TEST(GrammarText, BracketsNestOnlySoDeep) {
  for (const Kind kind : {Kind::kRegex, Kind::kEbnf, Kind::kJsonSchema, Kind::kStructuralTag})
    expect_names(enforced_text({kind, std::string(100000, '[')}).status().message(), {"deeper than 256"});
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
               {"$.properties.p.maxLength 50000"});
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
