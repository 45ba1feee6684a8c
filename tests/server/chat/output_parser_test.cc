#include "server/chat/output_parser.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

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
  for (const OutputPart& part : parts)
    text += std::string(names[static_cast<int>(part.kind)]) + "[" + part.text + "]";
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
  const std::string begin = std::string(kCallsBegin), call = std::string(kCallBegin),
                    sep = std::string(kCallSeparator), end = std::string(kCallEnd),
                    ends = std::string(kCallsEnd);
  expect_parts(make,
               "Hm.\n" + begin + call + "function" + sep + "f\n```json\n{\"a\": \"`\"}\n```" + end + "\n" +
                   call + "function" + sep + "g\n```json\n{}\n```" + end + ends,
               "content[Hm.]call[f]arguments[{\"a\": \"`\"}]call[g]arguments[{}]");
  expect_parts(make, begin + call + "f" + sep + "{\"a\":1}" + end + ends, "call[f]arguments[{\"a\":1}]");
  expect_parts(make, begin + call + "f" + sep + end + ends, "call[f]arguments[{}]");
  expect_parts(make, begin + call + "f" + sep + "{\"a\":", "call[f]arguments[{\"a\":]");
}

TEST(OutputParser, AJsonArrayOfCalls) {
  const Make make = calls(CallSyntax::kJsonArray);
  expect_parts(make, R"([{"name":"f","parameters":{"a":[1]}}, {"name":"g","parameters":{}}])",
               R"(call[f]arguments[{"a":[1]}]call[g]arguments[{}])");
  expect_parts(make, R"({"name":"f","parameters":{}})", "call[f]arguments[{}]");
  expect_parts(make, R"([{"name":"f","parameters":{"a)", R"(call[f]arguments[{"a])");
  expect_parts(make, "Sorry [x]", "content[Sorry [x]]");
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
