#include "server/chat/output_parser.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/chat/argument_types.h"
#include "server/json.h"

namespace fp4moe {
namespace {

using Kind = OutputPart::Kind;
using Make = std::function<std::unique_ptr<OutputParser>()>;

// Joins consecutive parts of one kind; calls stay separate.
OutputParts joined(const OutputParts& parts) {
  OutputParts result;
  for (const OutputPart& part : parts) {
    EXPECT_TRUE(!part.text.empty()) << "the parser returned an empty part";
    if (!result.empty() && part.kind != Kind::kCall && result.back().kind == part.kind)
      result.back().text += part.text;
    else
      result.push_back(part);
  }
  return result;
}

OutputParts parse(const Make& make, const std::vector<std::string>& pieces) {
  const auto parser = make();
  OutputParts parts;
  for (const std::string& piece : pieces) parser->push(piece, parts);
  parser->finish(parts);
  return joined(parts);
}

std::string to_string(const OutputParts& parts) {
  const char* const names[] = {"reasoning", "content", "call", "arguments"};
  std::string text;
  for (const OutputPart& part : parts) {
    text += std::string(names[static_cast<int>(part.kind)]) + "[" + part.text + "]";
    if (!part.id.empty()) text += "=" + part.id;
  }
  return text;
}

// The whole text, single bytes, and every cut at one and at two positions must all give `expected`.
void expect_parts(const Make& make, const std::string& text, const std::string& expected) {
  EXPECT_EQ(to_string(parse(make, {text})), expected) << text;
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  EXPECT_EQ(to_string(parse(make, bytes)), expected) << "byte by byte: " << text;
  for (size_t i = 0; i <= text.size(); ++i)
    for (size_t j = i; j <= text.size(); j += text.size() < 120 ? 1 : 7)
      ASSERT_EQ(to_string(parse(make, {text.substr(0, i), text.substr(i, j - i), text.substr(j)})), expected)
          << "cut at " << i << " and " << j << ": " << text;
}

Make calls(CallSyntax syntax) {
  return [syntax] { return make_call_parser(syntax); };
}
Make thinks(bool inside, CallSyntax syntax = CallSyntax::kNone) {
  return [=] { return make_think_parser(inside, make_call_parser(syntax)); };
}

TEST(OutputParser, ContentIsContent) {
  expect_parts(calls(CallSyntax::kNone), " a <tool_call> b\n", "content[ a <tool_call> b\n]");
  expect_parts(calls(CallSyntax::kNone), "", "");
}

TEST(OutputParser, Reasoning) {
  expect_parts(thinks(false), "<think>\nwell\n\n so\n</think>\n\nYes. \n",
               "reasoning[well\n\n so]content[Yes. \n]");
  expect_parts(thinks(true), "well</think>Yes", "reasoning[well]content[Yes]");
  expect_parts(thinks(true), "cut < off </thin", "reasoning[cut < off </thin]");
  expect_parts(thinks(false), "\n<think></think>Yes", "content[Yes]");
  expect_parts(thinks(false), " No <think>x</think>", "content[ No <think>x</think>]");
  expect_parts(thinks(false), "<thi", "content[<thi]");
  expect_parts(thinks(true), "a</think> \n", "reasoning[a]");
}

TEST(OutputParser, HermesCalls) {
  const Make make = calls(CallSyntax::kHermes);
  expect_parts(make, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": [1, \"}\"]}}\n</tool_call>",
               "call[f]arguments[{\"x\": [1, \"}\"]}]");
  expect_parts(make,
               "Sure: \n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>{\"arguments\" "
               ": {\"y\":2} , "
               "\"name\": \"g\"}</tool_call>\n done\n",
               "content[Sure:]call[f]arguments[{}]call[g]arguments[{\"y\":2}]content[done\n]");
  expect_parts(make, "no call\n", "content[no call\n]");
  expect_parts(make, "a < b <tool", "content[a < b <tool]");
}

TEST(OutputParser, HermesCallsThatAreNotAsTheyShould) {
  const Make make = calls(CallSyntax::kHermes);
  expect_parts(make, "<tool_call>nothing</tool_call> x", "content[<tool_call>nothing</tool_call> x]");
  expect_parts(make, "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
               "content[<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>]");
  expect_parts(make, "<tool_call>{\"name\": \"f\"}</tool_call>", "call[f]arguments[{}]");
  expect_parts(make, "<tool_call>{\"name\": \"f\", \"parameters\": {\"a\":1}}",
               "call[f]arguments[{\"a\":1}]");
  expect_parts(make, "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
               "call[f]arguments[{\"a\": 1}]");
  expect_parts(make, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"cut of",
               "call[f]arguments[{\"a\": \"cut of]");
  expect_parts(make, "<tool_call>{\"na", "content[<tool_call>{\"na]");
  expect_parts(make, "<tool_call>{\"name\": \"f\", \"arguments\": {\"t\": \"</tool_call>\\\"\"}}</tool_call>",
               "call[f]arguments[{\"t\": \"</tool_call>\\\"\"}]");
}

TEST(OutputParser, ReasoningThenCalls) {
  expect_parts(thinks(false, CallSyntax::kHermes),
               "<think>\n<tool_call>?\n</think>\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>",
               "reasoning[<tool_call>?]call[f]arguments[{}]");
}

TEST(OutputParser, DeepSeekCalls) {
  const Make make = calls(CallSyntax::kDeepSeek);
  const std::string begin = std::string(kDeepSeekTokens.section_begin),
                    call = std::string(kDeepSeekTokens.call_begin),
                    sep = std::string(kDeepSeekTokens.separator), end = std::string(kDeepSeekTokens.call_end),
                    ends = std::string(kDeepSeekTokens.section_end);
  expect_parts(make,
               "Hm.\n" + begin + call + "function" + sep + "f\n```json\n{\"a\": \"`\"}\n```" + end + "\n" +
                   call + "function" + sep + "g\n```json\n{}\n```" + end + ends,
               "content[Hm.]call[f]arguments[{\"a\": \"`\"}]call[g]arguments[{}]");
  expect_parts(make, begin + call + "f" + sep + "{\"a\":1}" + end + ends, "call[f]arguments[{\"a\":1}]");
  expect_parts(make, begin + call + "f" + sep + end + ends, "call[f]arguments[{}]");
  expect_parts(make, begin + call + "f" + sep + "{\"a\":", "call[f]arguments[{\"a\":]");
}

TEST(OutputParser, DeepSeekCallsThatAreNotAsTheyShould) {
  const Make make = calls(CallSyntax::kDeepSeek);
  const std::string begin = std::string(kDeepSeekTokens.section_begin),
                    call = std::string(kDeepSeekTokens.call_begin),
                    sep = std::string(kDeepSeekTokens.separator), end = std::string(kDeepSeekTokens.call_end),
                    ends = std::string(kDeepSeekTokens.section_end);
  expect_parts(make, begin + call + "f" + end + ends + "x", "content[" + call + "f" + end + "x]");
  expect_parts(make, begin + call + "f", "content[" + call + "f]");
  expect_parts(make, begin + call + "function" + sep + "f", "content[" + call + "function" + sep + "f]");
  expect_parts(make, begin + call + sep + "{}" + end + ends, "content[" + call + sep + "{}" + end + "]");
}

std::string kimi(const std::string& head, const std::string& arguments) {
  return std::string(kKimiTokens.call_begin) + head + std::string(kKimiTokens.separator) + arguments +
         std::string(kKimiTokens.call_end);
}

TEST(OutputParser, KimiCalls) {
  const Make make = calls(CallSyntax::kKimi);
  const std::string begin = std::string(kKimiTokens.section_begin),
                    end = std::string(kKimiTokens.section_end);
  expect_parts(make, "I look. \n" + begin + kimi("functions.look:0", R"({"x": "`"})") + end,
               R"(content[I look.]call[look]=functions.look:0arguments[{"x": "`"}])");
  expect_parts(make,
               begin + kimi("functions.a.b-c:11", "{}") + "\n" + kimi(" functions.f:12 ", "") + end + "\nx",
               "call[a.b-c]=functions.a.b-c:11arguments[{}]call[f]=functions.f:12arguments[{}]content[x]");
  expect_parts(make, kimi("look:3", " {} "), "call[look]=look:3arguments[{}]");
  expect_parts(make, kimi("functions.look", "{}"), "call[look]arguments[{}]");
  expect_parts(make, begin + kimi("functions.f:0", "[1] x"), "call[f]=functions.f:0arguments[[1] x]");
}

TEST(OutputParser, KimiCallsThatAreNotAsTheyShould) {
  const Make make = calls(CallSyntax::kKimi);
  const std::string begin = std::string(kKimiTokens.section_begin),
                    call = std::string(kKimiTokens.call_begin), end = std::string(kKimiTokens.section_end);
  const std::string cut = call + "functions.f:0" + std::string(kKimiTokens.separator);
  expect_parts(make, begin + cut + R"({"a": "b)", R"(call[f]=functions.f:0arguments[{"a": "b])");
  expect_parts(make, begin + call + "functions.f", "content[" + call + "functions.f]");
  expect_parts(make, begin + call + "f" + std::string(kKimiTokens.call_end) + "y",
               "content[" + call + "f" + std::string(kKimiTokens.call_end) + "y]");
  expect_parts(make, begin + kimi("two words", "{}") + kimi("functions.f:1", "{}") + end,
               "content[" + kimi("two words", "{}") + "]call[f]=functions.f:1arguments[{}]");
  expect_parts(make, begin + "so: " + kimi("functions.f:0", "{}") + "and" + end,
               "content[so:]call[f]=functions.f:0arguments[{}]content[and]");
  expect_parts(make, begin + end + "none", "content[none]");
}

TEST(OutputParser, KimiCallsEndReasoning) {
  const std::string section = std::string(kKimiTokens.section_begin) + kimi("functions.f:0", "{}");
  const Make make = [] {
    return make_think_parser(true, make_call_parser(CallSyntax::kKimi), kKimiTokens.section_begin);
  };
  expect_parts(make, "well \n" + section, "reasoning[well]call[f]=functions.f:0arguments[{}]");
  expect_parts(make, "well</think>Yes. " + section,
               "reasoning[well]content[Yes.]call[f]=functions.f:0arguments[{}]");
  expect_parts(thinks(true, CallSyntax::kKimi), section, "reasoning[" + section + "]");
}

// The parameters of f: s, e and m are strings, of which e and m have limits, n an integer, u a string or
// null, o an object, b a boolean or null. g has no parameters.
Make tagged(CallSyntax syntax = CallSyntax::kArgumentTags) {
  auto types = std::make_shared<ArgumentTypes>();
  types->add("f", json::parse(R"({"type": "object", "properties": {"s": {"type": "string"},
    "e": {"$ref": "#/$defs/E"}, "n": {"type": "integer"}, "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "o": {"type": "object"}, "m": {"type": "string", "maxLength": 9}, "b": {"type": ["boolean", "null"]}},
    "$defs": {"E": {"enum": ["1", "2"]}}})"));
  types->add("g", json::object());
  return [=] { return make_call_parser(syntax, types); };
}
std::string argument(const std::string& key, const std::string& value, const std::string& space = "") {
  return "<arg_key>" + key + "</arg_key>" + space + "<arg_value>" + value + "</arg_value>" + space;
}

TEST(OutputParser, CallsWithArgumentTags) {
  for (const std::string space : {"", "\n"}) {
    expect_parts(tagged(),
                 "Sure.\n<tool_call>f" + space + argument("s", "12", space) + argument("n", "12", space) +
                     argument("o", "{\"a\": [1]}", space) + "</tool_call>",
                 R"(content[Sure.]call[f]arguments[{"s": "12", "n": 12, "o": {"a": [1]}}])");
    expect_parts(tagged(),
                 "<tool_call>g" + space + "</tool_call>" + space + "<tool_call>f" + space +
                     argument("e", "1", space) + "</tool_call>" + space + "done",
                 R"(call[g]arguments[{}]call[f]arguments[{"e": "1"}]content[done])");
  }
}

TEST(OutputParser, ValuesOfArgumentTagsHaveTheTypesOfTheSchema) {
  const auto value = [](const std::string& key, const std::string& text) {
    const auto parts = parse(tagged(), {"<tool_call>f" + argument(key, text) + "</tool_call>"});
    EXPECT_EQ(parts.size(), 2u) << text;
    const std::string& arguments = parts.back().text;
    EXPECT_TRUE(arguments.starts_with("{\"" + key + "\": ") && arguments.ends_with("}")) << arguments;
    EXPECT_TRUE(json::accept(arguments)) << arguments;
    return arguments.substr(key.size() + 5, arguments.size() - key.size() - 6);
  };
  EXPECT_EQ(value("s", " a\n\"b\"\\\t\x01 <arg_key> \xC3\xA9"), R"(" a\n\"b\"\\\u0009\u0001 <arg_key> é")");
  EXPECT_EQ(value("s", ""), R"("")");
  EXPECT_EQ(value("s", "{\"a\": 1}"), R"("{\"a\": 1}")");
  EXPECT_EQ(value("e", "\n 1 \t"), R"("1")") << "a text with limits has no white space around it";
  EXPECT_EQ(value("m", " a  b\n"), R"("a  b")");
  EXPECT_EQ(value("m", " \n"), R"("")");
  EXPECT_EQ(value("n", " 12345678901234567890123.50 "), "12345678901234567890123.50")
      << "the text of a number is unchanged";
  EXPECT_EQ(value("n", "twelve"), R"("twelve")") << "text that is not JSON stays text";
  EXPECT_EQ(value("n", "1.5"), "1.5") << "no string is allowed, so the value is not turned into one";
  EXPECT_EQ(value("u", "null"), "null");
  EXPECT_EQ(value("u", "12"), R"("12")");
  EXPECT_EQ(value("u", "text"), R"("text")");
  EXPECT_EQ(value("o", "{'a': 1}"), R"("{'a': 1}")");
  EXPECT_EQ(value("b", "False"), "false") << "as Python";
  EXPECT_EQ(value("b", "\nTrue"), "true");
  EXPECT_EQ(value("b", "None"), "null");
  EXPECT_EQ(value("n", std::string("12\0", 3)), R"("12\u0000")");
  EXPECT_EQ(value("n", "True"), R"("True")") << "not allowed by the schema";
  EXPECT_EQ(value("u", "None"), R"("None")") << "a string is allowed";
  EXPECT_EQ(value("unknown", "True"), R"("True")");
  EXPECT_EQ(value("unknown", "true"), "true");
  EXPECT_EQ(value("unknown", "yes"), R"("yes")");
  EXPECT_EQ(value("unknown", std::string(100, '[')), "\"" + std::string(100, '[') + "\"") << "too deep";
}

TEST(OutputParser, ArgumentTagsThatAreNotAsTheyShould) {
  const Make make = tagged();
  for (const std::string text :
       {"<tool_call>two words</tool_call> x", "<tool_call></tool_call>", "a <tool_call>f", "<tool_call>f<arg",
        R"(<tool_call>{"name": "f", "arguments": {}}</tool_call>)",
        "<tool_call>? <arg_key>s</arg_key></tool_call>"})
    expect_parts(make, text, "content[" + text + "]");
  expect_parts(make, "<tool_call>so\nthen <tool_call>f</tool_call>",
               "content[<tool_call>so\nthen]call[f]arguments[{}]");
  expect_parts(make,
               "<tool_call>f" + argument("n", "1") + "and" + argument("s", "2") + "<tool_call>f</tool_call>",
               R"(call[f]arguments[{"n": 1, "s": "2"}]content[and]call[f]arguments[{}])");
  expect_parts(make, "<tool_call>f<arg_key>n</arg_key></tool_call>",
               "call[f]arguments[{}]content[<arg_key>n</arg_key>]");
  expect_parts(make, "<tool_call>f<arg_key>n</arg_key> is <arg_value>1</arg_value></tool_call>",
               R"(call[f]arguments[{"n": 1}]content[is ])");
}

TEST(OutputParser, ArgumentTagsCutAnywhereKeepTheCall) {
  const Make make = tagged();
  expect_parts(make, "<tool_call>f" + argument("n", "1") + "<arg_key>s", R"(call[f]arguments[{"n": 1, "s])");
  expect_parts(make, "<tool_call>f<arg_key>s</arg_key>\n<arg_", R"(call[f]arguments[{"s"])");
  expect_parts(make, "<tool_call>f<arg_key>s</arg_key><arg_value>a\"<b", R"(call[f]arguments[{"s": "a\"<b])");
  expect_parts(make, "<tool_call>f<arg_key>m</arg_key><arg_value> a b <",
               R"(call[f]arguments[{"m": "a b <])");
  expect_parts(make, "<tool_call>f<arg_key>n</arg_key><arg_value>12", R"(call[f]arguments[{"n": 12])");
  expect_parts(make, "<tool_call>f" + argument("n", "1") + "</tool_c", R"(call[f]arguments[{"n": 1])");
}

std::string parameter(const std::string& key, const std::string& value) {
  return "<parameter=" + key + ">\n" + value + "\n</parameter>\n";
}
std::string function(const std::string& name, const std::string& parameters) {
  return "<tool_call>\n<function=" + name + ">\n" + parameters + "</function>\n</tool_call>";
}

TEST(OutputParser, CallsWithFunctionTags) {
  const Make make = tagged(CallSyntax::kFunctionTags);
  expect_parts(make, "Sure.\n\n" + function("f", parameter("s", "12") + parameter("n", "12")) + "\n",
               R"(content[Sure.]call[f]arguments[{"s": "12", "n": 12}])");
  expect_parts(make, function("g", "") + "\n" + function("f", parameter("o", R"({"a": [1]})")) + "\ndone",
               R"(call[g]arguments[{}]call[f]arguments[{"o": {"a": [1]}}]content[done])");
  expect_parts(make, "<tool_call><function=f><parameter=e>1</parameter></function></tool_call>",
               R"(call[f]arguments[{"e": "1"}])");
  expect_parts(make, function("unknown.name", parameter("x", "[1]")),
               R"(call[unknown.name]arguments[{"x": [1]}])");
  expect_parts(make, "a <b> </tool_call> <func", "content[a <b> </tool_call> <func]");
}

TEST(OutputParser, ValuesOfFunctionTagsKeepTheirText) {
  const auto value = [](const std::string& key, const std::string& text) {
    const std::string call = "<tool_call>\n<function=f>\n<parameter=" + key + ">" + text;
    const auto parts =
        parse(tagged(CallSyntax::kFunctionTags), {call + "</parameter>\n</function>\n</tool_call>"});
    EXPECT_EQ(parts.size(), 2u) << text;
    const std::string& arguments = parts.back().text;
    EXPECT_TRUE(json::accept(arguments)) << arguments;
    return json::parse(arguments).at(key);
  };
  EXPECT_EQ(value("s", "\n  a\n\tb \n"), "  a\n\tb ") << "one line feed at each end is not text";
  EXPECT_EQ(value("s", "\n\n\na\n\n\n"), "\n\na\n\n");
  EXPECT_EQ(value("s", "inline"), "inline");
  for (const std::string empty : {"", "\n", "\n\n"}) EXPECT_EQ(value("s", empty), "") << empty.size();
  EXPECT_EQ(value("s", "\n\"\\\x01 \xC3\xA9\n"), "\"\\\x01 \xC3\xA9");
  EXPECT_EQ(value("s", "\n{\"a\": 1}\n"), "{\"a\": 1}") << "a string stays a string";
  EXPECT_EQ(value("s", "\ntrue\n"), "true");
  EXPECT_EQ(value("m", "\n\n a b \n\n"), "a b") << "limited texts have no white space around them";
  EXPECT_EQ(value("n", "\n12\n"), 12);
  EXPECT_EQ(value("n", "\ntwelve\n"), "twelve");
  EXPECT_EQ(value("b", "\nTrue\n"), true);
  EXPECT_EQ(value("u", "\nnull\n"), nullptr);
  EXPECT_EQ(value("u", "\n  text\n"), "  text");
  EXPECT_EQ(value("o", "\n{\n \"a\": [1,\n2]\n}\n"), (json{{"a", {1, 2}}}));
  EXPECT_EQ(value("unknown", "\n1.5\n"), 1.5);
}

// Texts about XML, or about these very calls.
TEST(OutputParser, ValuesOfFunctionTagsMayHaveTagsInThem) {
  for (const std::string text :
       {"<p>\n<parameter name=\"x\">1</parameter>\n</p>", "</parameter></parameter>x", "</parameter>\n.",
        " <parameter=n>", "a\n<parameter=other>\nb", "a\n</function>\n</doc>", "x <tool_call> y",
        "a</function>", "\n<parameter", "<tool_call>\n<function=g>", "</tool_call>", "</parameter"})
    expect_parts(tagged(CallSyntax::kFunctionTags), function("f", parameter("s", text) + parameter("n", "1")),
                 "call[f]arguments[{\"s\": \"" + json_escaped(text) + "\", \"n\": 1}]");
}

TEST(OutputParser, FunctionTagsMayBeMissing) {
  const Make make = tagged(CallSyntax::kFunctionTags);
  const std::string called = R"(call[f]arguments[{"s": "a\n", "n": 1}])";
  const std::string begin = "<tool_call>\n<function=f>\n<parameter=s>\na\n\n",
                    end = "<parameter=n>\n1\n</parameter>\n</function>\n";
  expect_parts(make, begin + end + "</tool_call>", called);
  expect_parts(make, begin + "</parameter>\n" + end, called);
  expect_parts(make, begin + end + function("g", ""), called + "call[g]arguments[{}]");
  expect_parts(make, begin + end + "<function=g>\n</function>\n</tool_call>",
               called + "call[g]arguments[{}]");
  expect_parts(make, begin + "</parameter>\n<parameter=n>\n1\n</function>\n</tool_call>\nso",
               called + "content[so]");
  expect_parts(make, begin + "</parameter>\n<parameter=n>\n1\n</parameter>\n</tool_call>\nso",
               called + "content[so]");
  expect_parts(make, "I look.\n\n<function=f>\n" + parameter("n", "1") + "</function>\n</tool_call>\nso",
               R"(content[I look.]call[f]arguments[{"n": 1}]content[so])");
  expect_parts(make, "<function=g></function><function=other></function></tool_call>",
               "call[g]arguments[{}]call[other]arguments[{}]");
}

TEST(OutputParser, FunctionTagsThatAreNotAsTheyShould) {
  const Make make = tagged(CallSyntax::kFunctionTags);
  for (const std::string text :
       {"The tag <tool_call> opens a call.", "<tool_call></tool_call>", "a <function=g> b",
        "<tool_call>\n<function", "\n<function=other>\n</function>", "<tool_call>\n<function=two words>",
        "<tool_call>\n<function=>", R"(<tool_call>{"name": "f", "arguments": {}}</tool_call>)",
        "<tool_call><tool_call>\n<function=f", "<function=g\n>", "<tool_call>\n<function=f<function=g>"})
    expect_parts(make, text, "content[" + text + "]");
  expect_parts(make, "<tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
               "content[<tool_call>]call[g]arguments[{}]");
  expect_parts(make, function("f", parameter("n", "1") + "and\n" + parameter("s", "2")) + "\n.",
               "call[f]arguments[{\"n\": 1, \"s\": \"2\"}]content[and\n\n.]");
  expect_parts(make, function("f", "so: " + parameter("n", "1")),
               "call[f]arguments[{\"n\": 1}]content[so:\n]");
  expect_parts(make, function("f", "<parameter=\n" + parameter("n", "1")),
               "call[f]arguments[{\"n\": 1}]content[<parameter=\n]");
  expect_parts(make, function("f", "<parameter=>"), "call[f]arguments[{}]content[<parameter=>\n]");
  expect_parts(make, function("g", "") + "\nso</tool_call>", "call[g]arguments[{}]content[so</tool_call>]");
}

TEST(OutputParser, FunctionTagsCutAnywhereKeepTheCall) {
  const Make make = tagged(CallSyntax::kFunctionTags);
  const std::string begin = "<tool_call>\n<function=f>\n";
  expect_parts(make, begin, "call[f]");
  expect_parts(make, begin + "<param", "call[f]");
  expect_parts(make, begin + parameter("n", "1") + "<parameter=s", R"(call[f]arguments[{"n": 1, "s])");
  expect_parts(make, begin + "<parameter=s>\n a\"<b\n", R"(call[f]arguments[{"s": " a\"<b])");
  expect_parts(make, begin + "<parameter=s>\na</param", R"(call[f]arguments[{"s": "a</param])");
  expect_parts(make, begin + "<parameter=s>\na\n<parameter=n", R"(call[f]arguments[{"s": "a\n<parameter=n])");
  expect_parts(make, begin + "<parameter=n>\n12", R"(call[f]arguments[{"n": 12])");
  expect_parts(make, begin + "<parameter=s>\na\n</parameter>\n</func", R"(call[f]arguments[{"s": "a"])");
  expect_parts(make, begin + "<parameter=s>\na\n</function>\n", R"(call[f]arguments[{"s": "a"}])");
  expect_parts(make, begin + parameter("n", "1") + "</function>\n</tool", R"(call[f]arguments[{"n": 1}])");
}

TEST(OutputParser, FunctionTagsEndReasoning) {
  const Make make = [] {
    return make_think_parser(true, tagged(CallSyntax::kFunctionTags)(), kFunctionCallBegin);
  };
  expect_parts(make, "\nwell \n" + function("g", ""), "reasoning[well]call[g]arguments[{}]");
  expect_parts(make, "a <tool_call> is\n</think>\n\nYes.\n\n" + function("g", ""),
               "reasoning[a <tool_call> is]content[Yes.]call[g]arguments[{}]");
}

TEST(OutputParser, AJsonArrayOfCalls) {
  const Make make = calls(CallSyntax::kJsonArray);
  expect_parts(make, R"([{"name":"f","parameters":{"a":[1]}}, {"name":"g","parameters":{}}])",
               R"(call[f]arguments[{"a":[1]}]call[g]arguments[{}])");
  expect_parts(make, R"({"name":"f","parameters":{}})", "call[f]arguments[{}]");
  expect_parts(make, R"([{"name":"f","parameters":{"a)", R"(call[f]arguments[{"a])");
  expect_parts(make, "Sorry [x]", "content[Sorry [x]]");
}

TEST(OutputParser, AForcedCallThatIsCutOffHasNoText) {
  const auto forced = [](CallSyntax syntax) {
    return [syntax] { return make_forced_parser(make_call_parser(syntax)); };
  };
  const std::string whole = R"([{"name":"f","parameters":{"a":1}}])";
  for (size_t size = 0; size <= whole.size(); ++size) {
    std::string parts = size < 12 ? "" : "call[f]";  // 12 is the end of the name
    if (size > 26) parts += "arguments[" + whole.substr(26, std::min<size_t>(size, 33) - 26) + "]";
    expect_parts(forced(CallSyntax::kJsonArray), whole.substr(0, size), parts);
  }
  expect_parts(forced(CallSyntax::kHermes), R"(<tool_call>{"name": "f)", "");
  expect_parts(forced(CallSyntax::kHermes), R"(<tool_call>{"name": "f", "arguments": {"a)",
               R"(call[f]arguments[{"a])");
  expect_parts(forced(CallSyntax::kDeepSeek), "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>fun", "");
}

TEST(OutputParser, Harmony) {
  const Make make = make_harmony_parser;
  expect_parts(make,
               "<|channel|>analysis<|message|>Hm <b><|end|><|start|>assistant<|channel|>final<|message|>Yes",
               "reasoning[Hm <b>]content[Yes]");
  expect_parts(make, "<|channel|>final<|message|>Yes<|return|>", "content[Yes]");
  expect_parts(make,
               "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f "
               "<|constrain|>json<|message|>{\"a\": 1}<|call|>",
               "reasoning[a]call[f]arguments[{\"a\": 1}]");
  expect_parts(make, " to=functions.f<|channel|>commentary<|message|>{}", "call[f]arguments[{}]");
  expect_parts(
      make,
      "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=browser.open<|channel|>analysis "
      "code<|message|>",
      "content[I look.]call[browser.open]arguments[{}]");
}

TEST(OutputParser, HarmonyWithMarkersOutOfPlace) {
  const Make make = make_harmony_parser;
  expect_parts(make, "Hello", "content[Hello]");
  expect_parts(make, "<|message|>Hello<|message|> you<|constrain|>", "content[Hello you]");
  expect_parts(make, "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "reasoning[a]content[b]");
  expect_parts(make, "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b<|chan",
               "reasoning[a]content[b<|chan]");
  expect_parts(make, "<|channel|><|channel|>final<|message|>b<|end|><|end|>", "content[b]");
  expect_parts(make, "<|end|><|start|>assistant<|message|>b", "content[b]");
  expect_parts(make, "to be or not", "content[to be or not]");
  expect_parts(make, "<|channel|>other<|message|>b", "content[b]");
  expect_parts(make, "<|channel|>final", "");
}

}  // namespace
}  // namespace fp4moe
