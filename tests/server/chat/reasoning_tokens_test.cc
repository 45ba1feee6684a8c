// The fake engine has one token per byte, and ids from 257 on for special tokens.
#include "server/chat/reasoning_tokens.h"

#include <gtest/gtest.h>

#include "server/fake_engine.h"

namespace fp4moe {
namespace {

const FakeOptions kEngine{
    .special_tokens = {"<|channel|>", "<|message|>", "<|end|>", "<|start|>", "</think>"}};
const OutputPlan kThinks{.thinks = true}, kInside{.starts_inside_reasoning = true, .thinks = true},
    kHarmony{.calls = CallSyntax::kHarmony};

// The count of the whole output, which must not depend on how it is cut into deltas.
int64_t count(const OutputPlan& plan, const std::string& text) {
  const FakeEngine engine(kEngine);
  std::vector<int32_t> ids = *engine.tokenize(text, false);
  ids.push_back(FakeEngine::kEnd);
  const int64_t whole = count_reasoning_tokens(engine, plan, ids, FakeEngine::kEnd);
  for (size_t size = 1; size < ids.size(); ++size) {
    ReasoningTokens tokens(engine, plan);
    for (size_t at = 0; at < ids.size(); at += size)
      tokens.push(std::span(ids).subspan(at, std::min(size, ids.size() - at)),
                  at + size < ids.size() ? -1 : FakeEngine::kEnd);
    EXPECT_EQ(tokens.finish(), whole) << text << " in deltas of " << size;
  }
  return whole;
}

TEST(ReasoningTokens, OfThinkingModels) {
  EXPECT_EQ(count(kThinks, "<think>abc</think>def"), 3);
  EXPECT_EQ(count(kThinks, " <think>\n\nab c \n</think>\n\ndef"), 4);  // white space around it is dropped
  EXPECT_EQ(count(kThinks, "<think>a </thin b</think>"), 10);
  EXPECT_EQ(count(kThinks, "abc</think>"), 0);
  EXPECT_EQ(count(kThinks, "<think>cut off </thi"), 13);
  EXPECT_EQ(count(kThinks, ""), 0);
  EXPECT_EQ(count(kInside, "abc</think>def"), 3);
}

TEST(ReasoningTokens, OfHarmony) {
  EXPECT_EQ(count(kHarmony,
                  "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>de"),
            3);
  EXPECT_EQ(count(kHarmony, "<|channel|>final<|message|>de"), 0);
  EXPECT_EQ(count(kHarmony,
                  "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>analysis<|message|> c "
                  "<|end|>"),
            5);
  EXPECT_EQ(count(kHarmony, "abc"), 0);
}

TEST(ReasoningTokens, OfATokenWithTextOnBothSides) {
  const FakeEngine engine({.special_tokens = {"b</think>c", "c</think>"}});
  const auto count = [&](const std::string& text) {
    return count_reasoning_tokens(engine, kInside, *engine.tokenize(text, false), -1);
  };
  EXPECT_EQ(count("ab</think>cd"), 2);
  EXPECT_EQ(count("abc</think>d"), 3);
}

TEST(ReasoningTokens, NoneWithoutReasoningSyntax) {
  EXPECT_EQ(count(OutputPlan{}, "<think>abc</think>"), 0);
  EXPECT_EQ(count(OutputPlan{.calls = CallSyntax::kHermes}, "<think>abc</think>"), 0);
}

}  // namespace
}  // namespace fp4moe
