// Grammar budgets: a hostile grammar fails with an error that names the construct and never exceeds its
// budget.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "engine/fake_tokenizer.h"
#include "engine/grammar/grammar.h"

namespace fp4moe {
namespace {

constexpr int64_t kVocab = 300;
using Kind = GrammarSpec::Kind;

// Results of compiling a grammar and drawing a text from it.
struct Outcome {
  Status status;
  int num_tokens = 0;
  int64_t compile_steps = 0;
  int64_t matcher_steps = 0;
  int64_t most_steps = 0;  // largest number of steps in a single matcher call

  friend bool operator==(const Outcome& a, const Outcome& b) {
    return a.status.to_string() == b.status.to_string() && a.num_tokens == b.num_tokens &&
           a.compile_steps == b.compile_steps && a.matcher_steps == b.matcher_steps;
  }
};

class GrammarBudgetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (compiler_ == nullptr) GTEST_SKIP() << "this build has no xgrammar";
  }

  static std::vector<int32_t> ids_of(const std::vector<uint32_t>& allowed) {
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < kVocab; ++id)
      if ((allowed[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) ids.push_back(id);
    return ids;
  }

  // Draws up to num_tokens tokens; draws the end token only if nothing else is allowed.
  Outcome generate(const GrammarSpec& spec, int num_tokens,
                   const GrammarBudget& compile_budget = kCompileBudget) {
    Outcome outcome;
    const auto grammar = compiler_->compile(spec, compile_budget);
    outcome.status = grammar.status();
    if (!grammar.ok()) return outcome;
    outcome.compile_steps = (*grammar)->num_steps();
    const auto matcher = (*grammar)->make_matcher();
    std::mt19937 random(1);
    std::vector<uint32_t> allowed((kVocab + 31) / 32);
    for (; outcome.num_tokens < num_tokens && !matcher->has_ended(); ++outcome.num_tokens) {
      const int64_t before = matcher->num_steps();
      outcome.status = matcher->fill_allowed(allowed, kMaskBudget);
      const int64_t after = matcher->num_steps();
      if (!outcome.status.ok()) break;
      std::vector<int32_t> ids = ids_of(allowed);
      if (ids.size() > 1) std::erase(ids, kEosId);
      if (ids.empty()) break;
      outcome.status = matcher->accept(ids[random() % ids.size()], kAcceptBudget);
      outcome.most_steps = std::max({outcome.most_steps, after - before, matcher->num_steps() - after});
      if (!outcome.status.ok()) break;
    }
    outcome.matcher_steps = matcher->num_steps();
    return outcome;
  }

  void expect_bounded(const GrammarSpec& spec, const std::string& construct) {
    const auto begin = std::chrono::steady_clock::now();
    const Outcome outcome = generate(spec, 300, {.max_steps = 300'000'000, .max_bytes = 256 << 20});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    EXPECT_LE(outcome.most_steps, kMaskBudget.max_steps + (1 << 14)) << spec.text;
    EXPECT_LT(seconds.count(), 300) << spec.text;  // minutes to hours without a budget
    if (outcome.status.ok()) return;
    EXPECT_EQ(outcome.status.code(), StatusCode::kInvalidArgument) << outcome.status.to_string();
    EXPECT_NE(outcome.status.message().find(construct), std::string::npos) << outcome.status.to_string();
  }

  Tokenizer tokenizer_ = fake_tokenizer({"ab", "aaaa", "aaaaaaaaaaaaaaaaaaaaaaaa", "},", "p1"});
  std::unique_ptr<GrammarCompiler> compiler_ = make_grammar_compiler(tokenizer_, kVocab, {kEosId});
};

TEST_F(GrammarBudgetTest, NestedRepetitionsAreBounded) {
  expect_bounded({Kind::kRegex, "(.{0,20}){0,20}x"}, "rule root");
  expect_bounded({Kind::kRegex, "(.{0,999}){0,999}x"}, "(.{0,999}){0,999}");
  expect_bounded({Kind::kRegex, "((.{0,999}){0,999}){0,999}x"}, "((.{0,999}){0,999}){0,999}");
  expect_bounded({Kind::kJsonSchema, R"({"type":"string","pattern":"^(.{0,99}){0,99}x$"})"},
                 "(.{0,99}){0,99}");
  expect_bounded({Kind::kEbnf, "root ::= (\"a\"? \"a\"?){0,500} \"x\""}, "{0,500}");
}

TEST_F(GrammarBudgetTest, AmbiguousRulesAreBounded) {
  expect_bounded({Kind::kEbnf, "root ::= s\ns ::= s s | \"a\" | \"\""}, "rule s");
  expect_bounded({Kind::kEbnf, "root ::= s\ns ::= s s s | [a-z ]"}, "rule s");
  expect_bounded({Kind::kEbnf, "root ::= s\ns ::= s s | s s s | s s s s | [a-b]"}, "rule s");
}

TEST_F(GrammarBudgetTest, ManyPropertiesAreBounded) {
  std::string properties;
  for (int i = 0; i < 3500; ++i)
    properties += (i == 0 ? "\"p" : ",\"p") + std::to_string(i) + "\":{\"type\":\"string\"}";
  expect_bounded({Kind::kJsonSchema, R"({"type":"object","properties":{)" + properties + "}}"},
                 "3500 properties");
}

TEST_F(GrammarBudgetTest, RecursionIsBounded) {
  std::string rules = "root ::= r0\n", chain = R"({"$ref":"#/$defs/d0","$defs":{)";
  for (int i = 0; i < 5000; ++i) {
    const std::string next = std::to_string(i + 1);
    rules += "r" + std::to_string(i) + " ::= \"a\" r" + next + " | \"b\"\n";
    chain += "\"d" + std::to_string(i) + R"(":{"$ref":"#/$defs/d)" + next + "\"},";
  }
  expect_bounded({Kind::kEbnf, rules + "r5000 ::= \"c\""}, "rule");
  EXPECT_EQ(generate({Kind::kJsonSchema, chain + R"("d5000":{"type":"null"}}})"}, 1).status.code(),
            StatusCode::kInvalidArgument);
  // Two rules that repeat each other.
  const Status mutual = generate({Kind::kEbnf, "root ::= a{2,300}\na ::= root{2,300}"}, 1).status;
  EXPECT_EQ(mutual.code(), StatusCode::kInvalidArgument) << mutual.to_string();
}

TEST_F(GrammarBudgetTest, WhatMatchesNoTextIsRefused) {
  for (const std::string rules :
       {"root ::= root", "root ::= \"a\" root", "root ::= a b\na ::= \"x\"\nb ::= \"[\" b \"]\""}) {
    const Status status = generate({Kind::kEbnf, rules}, 1).status;
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << rules;
    EXPECT_NE(status.message().find("no text matches"), std::string::npos) << status.to_string();
  }
  for (const std::string schema :
       {R"({"allOf":[{"$ref":"#"}]})", R"({"type":"array","items":{"$ref":"#"},"minItems":1})"})
    EXPECT_EQ(generate({Kind::kJsonSchema, schema}, 1).status.code(), StatusCode::kInvalidArgument) << schema;
}

TEST_F(GrammarBudgetTest, ADeadEndIsTheGrammarsFault) {
  const auto grammar = compiler_->compile({Kind::kEbnf, "root ::= \"a\" x | \"b\"\nx ::= x"}, kCompileBudget);
  ASSERT_TRUE(grammar.ok()) << grammar.status().to_string();
  const auto matcher = (*grammar)->make_matcher();
  ASSERT_TRUE(matcher->accept('a', kAcceptBudget).ok());
  std::vector<uint32_t> allowed((kVocab + 31) / 32);
  const Status status = matcher->fill_allowed(allowed, kMaskBudget);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("dead end"), std::string::npos) << status.to_string();
}

TEST_F(GrammarBudgetTest, OrdinaryGrammarsTakeLittle) {
  std::string optional, required;
  for (int i = 0; i < 400; ++i)
    optional += (i == 0 ? "\"p" : ",\"p") + std::to_string(i) + "\":{\"type\":\"string\"}";
  for (int i = 0; i < 400; ++i) required += (i == 0 ? "\"p" : ",\"p") + std::to_string(i) + "\"";
  const GrammarSpec specs[] = {
      {Kind::kJsonSchema, R"({"type":"object","properties":{)" + optional + "}}"},
      {Kind::kJsonSchema,
       R"({"type":"object","properties":{)" + optional + R"(},"required":[)" + required + "]}"},
      {Kind::kJsonSchema, R"({"type":"string","maxLength":1000})"},
      {Kind::kJsonSchema, R"({"type":"array","items":{"type":"string","maxLength":200},"maxItems":100})"},
      {Kind::kRegex, "([A-Za-z ]{1,60}[.!?] ){1,5}"},
      {Kind::kRegex, "(([a-z]{1,20} ){1,20}\\. ){1,20}"},
      {Kind::kEbnf, "root ::= e\ne ::= e \"+\" e | e \"*\" e | [0-9]+ | \"(\" e \")\""}};
  for (const GrammarSpec& spec : specs) {
    const Outcome outcome = generate(spec, 200);
    EXPECT_TRUE(outcome.status.ok()) << spec.text.substr(0, 100) << ": " << outcome.status.to_string();
    EXPECT_GT(outcome.num_tokens, 2) << spec.text.substr(0, 100);
    EXPECT_LT(outcome.most_steps, kMaskBudget.max_steps / 10) << spec.text.substr(0, 100);
  }
}

TEST_F(GrammarBudgetTest, StepsAreTheSameEveryTime) {
  for (const GrammarSpec& spec :
       {GrammarSpec{Kind::kRegex, "(.{0,20}){0,20}x"},
        GrammarSpec{Kind::kEbnf, "root ::= s\ns ::= s s | \"a\" | \"\""},
        GrammarSpec{Kind::kJsonSchema,
                    R"({"type":"object","properties":{"a":{"type":"string","maxLength":9}}})"}}) {
    const Outcome first = generate(spec, 100);
    EXPECT_GT(first.compile_steps, 0);
    EXPECT_GT(first.matcher_steps, 0);
    EXPECT_EQ(first, generate(spec, 100)) << spec.text;
    std::optional<Outcome> on_other_thread;
    std::thread([&] { on_other_thread = generate(spec, 100); }).join();
    EXPECT_EQ(first, *on_other_thread) << spec.text;
  }
}

// The budget is exact: the steps that a compilation took suffice for it, one fewer does not.
TEST_F(GrammarBudgetTest, TheBudgetIsTheLimit) {
  const GrammarSpec spec{Kind::kRegex, "([a-z]{1,20} ){1,20}"};
  const auto grammar = compiler_->compile(spec, kCompileBudget);
  ASSERT_TRUE(grammar.ok()) << grammar.status().to_string();
  GrammarBudget budget = kCompileBudget;
  budget.max_steps = (*grammar)->num_steps();
  EXPECT_TRUE(compiler_->compile(spec, budget).ok());
  --budget.max_steps;
  const Status steps = compiler_->compile(spec, budget).status();
  EXPECT_EQ(steps.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(steps.message().find(std::to_string(budget.max_steps) + " steps"), std::string::npos)
      << steps.message();
  budget = kCompileBudget;
  budget.max_bytes = 10000;
  const Status bytes = compiler_->compile(spec, budget).status();
  EXPECT_EQ(bytes.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(bytes.message().find("10000 bytes"), std::string::npos) << bytes.message();
}

TEST_F(GrammarBudgetTest, AMatcherMayHoldItsBytesAndNoMore) {
  const auto grammar = compiler_->compile({Kind::kEbnf, "root ::= s\ns ::= s s | \"a\""}, kCompileBudget);
  ASSERT_TRUE(grammar.ok());
  const auto matcher = (*grammar)->make_matcher();
  Status status;
  int num_tokens = 0;
  const GrammarBudget budget{.max_steps = int64_t{1} << 40, .max_bytes = 1 << 20};
  for (; status.ok() && num_tokens < 10000; ++num_tokens) status = matcher->accept('a', budget);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("1048576 bytes"), std::string::npos) << status.message();
  EXPECT_GT(num_tokens, 10);
}

// A failed matcher can be destroyed, and other matchers of the grammar continue to work.
TEST_F(GrammarBudgetTest, OtherMatchersOfTheGrammarGoOn) {
  const auto grammar = compiler_->compile({Kind::kRegex, "(a{0,9}){0,9}x"}, kCompileBudget);
  ASSERT_TRUE(grammar.ok()) << grammar.status().to_string();
  const auto bystander = (*grammar)->make_matcher();
  ASSERT_TRUE(bystander->accept('a', kAcceptBudget).ok());
  std::vector<uint32_t> before((kVocab + 31) / 32), after = before;
  ASSERT_TRUE(bystander->fill_allowed(before, kMaskBudget).ok());
  for (const int64_t max_steps : {1, 100, 10000}) {
    const auto matcher = (*grammar)->make_matcher();
    Status status;
    for (int i = 0; i < 100 && status.ok(); ++i) status = matcher->accept('a', {max_steps, 64 << 20});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << max_steps;
  }
  ASSERT_TRUE(bystander->fill_allowed(after, kMaskBudget).ok());
  EXPECT_EQ(before, after);
  EXPECT_TRUE(bystander->accept('x', kAcceptBudget).ok());
}

TEST_F(GrammarBudgetTest, CancellationIsNoticed) {
  std::atomic<bool> is_cancelled = true;
  GrammarBudget unlimited{
      .max_steps = int64_t{1} << 60, .max_bytes = int64_t{1} << 40, .is_cancelled = &is_cancelled};
  EXPECT_EQ(compiler_->compile({Kind::kRegex, "a"}, unlimited).status().code(), StatusCode::kCancelled);
  is_cancelled = false;
  const auto grammar = compiler_->compile({Kind::kEbnf, "root ::= s\ns ::= s s s | s s | \"a\""}, unlimited);
  ASSERT_TRUE(grammar.ok());
  const auto matcher = (*grammar)->make_matcher();
  // Tokens become slower and slower, so that one is in progress when they are cancelled.
  std::thread cancel([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    is_cancelled = true;
  });
  Status status;
  while (status.ok()) status = matcher->accept('a', unlimited);
  cancel.join();
  EXPECT_EQ(status.code(), StatusCode::kCancelled) << status.to_string();
}

// Random nested repetitions: each run ends within its budget, and two runs end the same way.
TEST_F(GrammarBudgetTest, RandomNestedRepetitionsAreBounded) {
  std::mt19937 random(7);
  const auto repeated = [&](const auto& self, int depth) -> std::string {
    const char* atoms[] = {".", "a", "[a-c]", "ab?", "\\d", "(a|b|ab)"};
    std::string text = depth == 0 ? atoms[random() % 6] : "(" + self(self, depth - 1) + ")";
    if (random() % 3 == 0) text += self(self, 0);
    const int low = static_cast<int>(random() % 4);
    const int high = low + 1 + static_cast<int>(random() % (random() % 4 == 0 ? 600 : 12));
    const std::string counts[] = {"*", "+", "{" + std::to_string(low) + ",}",
                                  "{" + std::to_string(low) + "," + std::to_string(high) + "}"};
    return "(" + text + ")" + counts[random() % 8 < 5 ? 3 : random() % 3];
  };
  const GrammarBudget compile_budget{.max_steps = 20'000'000, .max_bytes = 64 << 20};
  int num_failed = 0;
  for (int i = 0; i < 60; ++i) {
    const std::string regex = repeated(repeated, 1 + static_cast<int>(random() % 3)) + "x";
    const GrammarSpec spec{Kind::kRegex, regex};
    const Outcome outcome = generate(spec, 12, compile_budget);
    EXPECT_TRUE(outcome.status.ok() || outcome.status.code() == StatusCode::kInvalidArgument) << regex;
    EXPECT_LE(outcome.most_steps, kMaskBudget.max_steps + (1 << 14)) << regex;
    if (i % 10 == 0) {
      EXPECT_EQ(outcome, generate(spec, 12, compile_budget)) << regex;
    }
    num_failed += outcome.status.ok() ? 0 : 1;
  }
  EXPECT_GT(num_failed, 0);
  EXPECT_LT(num_failed, 50);
}

}  // namespace
}  // namespace fp4moe
