// Whole chat templates, with the constructs of the published ones, select the syntax of reasoning and calls.
#include "server/chat/output_dialect.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "server/fake_engine.h"

namespace fp4moe {
namespace {

struct Case {
  const char* file;
  CallSyntax calls;
  bool thinks, shows_tools;
};

class Template : public testing::TestWithParam<Case> {};

TEST_P(Template, SelectsItsSyntax) {
  std::ifstream file(std::string(FP4MOE_TEMPLATES "/") + GetParam().file);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  ASSERT_FALSE(text.empty());
  const FakeEngine engine(
      FakeOptions{.chat_template = text,
                  .special_tokens = {"<|tool_call_begin|>", "<tool_call>", "<think>", "</think>"}});
  const OutputDialect dialect = detect_dialect(engine);
  EXPECT_EQ(static_cast<int>(dialect.calls), static_cast<int>(GetParam().calls));
  EXPECT_EQ(dialect.thinks, GetParam().thinks);
  EXPECT_EQ(dialect.shows_tools, GetParam().shows_tools);
  EXPECT_EQ(dialect.needs_special_tokens, dialect.thinks || dialect.calls != CallSyntax::kNone);
}

INSTANTIATE_TEST_SUITE_P(All, Template,
                         testing::Values(Case{"function_tags.jinja", CallSyntax::kFunctionTags, true, true},
                                         Case{"argument_tags.jinja", CallSyntax::kArgumentTags, true, true},
                                         Case{"call_tokens.jinja", CallSyntax::kKimi, true, true},
                                         Case{"thinking.jinja", CallSyntax::kNone, true, false}),
                         [](const auto& test) {
                           const std::string file = test.param.file;
                           return file.substr(0, file.find('.'));
                         });

// A response to the prompt of function_tags.jinja, which opens the reasoning.
TEST(FunctionTags, ParseTheResponseOfATemplateThatOpensReasoning) {
  const FakeEngine engine(
      FakeOptions{.chat_template = "{{ tools }}<tool_call>\n<function=\n<parameter=\n<think></think>"});
  const OutputDialect dialect = detect_dialect(engine);
  const ToolUse tools{.functions = {{"look", {{"type", "object"}}, "tools[0].function.parameters"}}};
  const std::string prompt = "<|im_start|>assistant\n<think>\n";
  EXPECT_TRUE(plan_output(dialect, prompt, tools, true).starts_inside_reasoning);
  EXPECT_FALSE(plan_output(dialect, prompt + "\n</think>\n\n", tools, true).starts_inside_reasoning)
      << "enable_thinking is false";
  EXPECT_EQ(static_cast<int>(plan_output(dialect, prompt, tools, true).calls),
            static_cast<int>(CallSyntax::kFunctionTags));
  EXPECT_EQ(static_cast<int>(plan_output(dialect, prompt, {}, true).calls),
            static_cast<int>(CallSyntax::kNone));
}

}  // namespace
}  // namespace fp4moe
