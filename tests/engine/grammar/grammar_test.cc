#include "engine/grammar/grammar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>

#include "engine/fake_tokenizer.h"

namespace fp4moe {
namespace {

constexpr int64_t kVocab = 300;  // more ids than the tokenizer has tokens
using Kind = GrammarSpec::Kind;

class GrammarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (compiler_ == nullptr) GTEST_SKIP() << "this build has no xgrammar";
  }
  std::unique_ptr<GrammarMatcher> matcher(Kind kind, const std::string& text) {
    const auto grammar = compiler_->compile({kind, text}, kCompileBudget);
    EXPECT_TRUE(grammar.ok()) << grammar.status().to_string();
    return grammar.ok() ? (*grammar)->make_matcher() : nullptr;
  }
  std::string error(Kind kind, const std::string& text) {
    const auto grammar = compiler_->compile({kind, text}, kCompileBudget);
    EXPECT_FALSE(grammar.ok()) << text;
    EXPECT_EQ(grammar.status().code(), StatusCode::kInvalidArgument);
    return grammar.status().message();
  }
  static std::vector<int32_t> allowed_ids(GrammarMatcher& matcher) {
    std::vector<uint32_t> allowed((kVocab + 31) / 32);
    EXPECT_TRUE(matcher.fill_allowed(allowed, kMaskBudget).ok());
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < kVocab; ++id)
      if ((allowed[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) ids.push_back(id);
    return ids;
  }
  // Whether the grammar accepts exactly this text and its mask allowed every token of it.
  bool matches(Kind kind, const std::string& text, const std::string& answer) {
    const auto m = matcher(kind, text);
    std::vector<int32_t> ids = byte_ids(answer);
    ids.push_back(kEosId);
    for (const int32_t id : ids) {
      const std::vector<int32_t> allowed = allowed_ids(*m);
      const bool is_allowed = std::find(allowed.begin(), allowed.end(), id) != allowed.end();
      EXPECT_EQ(m->accept(id, kAcceptBudget).ok(), is_allowed);
      if (!is_allowed) return false;
    }
    return m->has_ended();
  }
  // Draws a random text that the grammar allows.
  std::string random_text(Kind kind, const std::string& text, uint32_t seed) {
    std::mt19937 random(seed);
    const auto m = matcher(kind, text);
    std::string answer;
    for (int i = 0; i < 500; ++i) {
      const std::vector<int32_t> allowed = allowed_ids(*m);
      if (allowed.empty()) break;
      const int32_t id = allowed[random() % allowed.size()];
      EXPECT_TRUE(m->accept(id, kAcceptBudget).ok()) << id << " after " << answer;
      if (id == kEosId) return answer;
      answer += tokenizer_.token_bytes(id);
    }
    ADD_FAILURE() << "the grammar does not end: " << answer;
    return answer;
  }

  Tokenizer tokenizer_ = fake_tokenizer({"<a>", "ab"});
  std::unique_ptr<GrammarCompiler> compiler_ = make_grammar_compiler(tokenizer_, kVocab, {kEosId});
};

TEST_F(GrammarTest, ARegexAllowsWhatMayComeNext) {
  const auto m = matcher(Kind::kRegex, "ab?c");
  EXPECT_EQ(allowed_ids(*m), (std::vector<int32_t>{'a', kFirstWordId + 1}));
  EXPECT_TRUE(m->accept(kFirstWordId + 1, kAcceptBudget).ok());  // "ab"
  EXPECT_EQ(allowed_ids(*m), std::vector<int32_t>{'c'});
  EXPECT_EQ(m->accept('a', kAcceptBudget).code(), StatusCode::kInternal);
  EXPECT_TRUE(m->accept('c', kAcceptBudget).ok());
  EXPECT_FALSE(m->has_ended());
  EXPECT_EQ(allowed_ids(*m), std::vector<int32_t>{kEosId});
  EXPECT_TRUE(m->accept(kEosId, kAcceptBudget).ok());
  EXPECT_TRUE(m->has_ended());
}

TEST_F(GrammarTest, EbnfStartsAtRoot) {
  const std::string rules = "root ::= greeting \" \" [a-z]+\ngreeting ::= \"hi\" | \"yo\"";
  EXPECT_TRUE(matches(Kind::kEbnf, rules, "hi you"));
  EXPECT_TRUE(matches(Kind::kEbnf, rules, "yo x"));
  EXPECT_FALSE(matches(Kind::kEbnf, rules, "hi "));
  EXPECT_FALSE(matches(Kind::kEbnf, rules, "he x"));
}

TEST_F(GrammarTest, AnEndTokenIsNotAllowedBeforeTheEnd) {
  EXPECT_FALSE(matches(Kind::kRegex, "[0-9]{3}", "12"));
  EXPECT_TRUE(matches(Kind::kRegex, "[0-9]{3}", "123"));
  EXPECT_TRUE(matches(Kind::kRegex, "\\ud83d\\ude00", "\U0001F600"));
}

TEST_F(GrammarTest, ATriggerBeginsATag) {
  const std::string tag =
      R"({"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<f"],"tags":[{"type":"tag",)"
      R"("begin":"<f>","content":{"type":"json_schema","json_schema":{"type":"null"}},"end":"</f>"}]}})";
  EXPECT_TRUE(matches(Kind::kStructuralTag, tag, "x<f>null</f>y"));
  EXPECT_TRUE(matches(Kind::kStructuralTag, tag, "xy"));
  EXPECT_FALSE(matches(Kind::kStructuralTag, tag, "x<f>1</f>"));
}

TEST_F(GrammarTest, JsonHasNoWhiteSpaceOfItsOwn) {
  const std::string schema =
      R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"array","items":{"type":"boolean"}}},)"
      R"("required":["a","b"]})";
  EXPECT_TRUE(matches(Kind::kJsonSchema, schema, R"({"a":12,"b":[true,false]})"));
  EXPECT_FALSE(matches(Kind::kJsonSchema, schema, R"({"a": 12,"b":[]})"));
  EXPECT_FALSE(matches(Kind::kJsonSchema, schema, R"({"a":12})"));
  EXPECT_FALSE(matches(Kind::kJsonSchema, schema, R"({"a":12,"b":[],"c":1})"));
}

TEST_F(GrammarTest, ABoundedStringHoldsNoControlCharacters) {
  const std::string schema = R"({"type":"string","maxLength":3})";
  EXPECT_TRUE(matches(Kind::kJsonSchema, schema, R"("abc")"));
  EXPECT_FALSE(matches(Kind::kJsonSchema, schema, R"("abcd")"));
  for (int control = 0; control < 0x20; ++control)
    EXPECT_FALSE(matches(Kind::kJsonSchema, schema, std::string("\"") + static_cast<char>(control) + "\""));
}

TEST_F(GrammarTest, RandomTextsEndAndAreTakenAgain) {
  const std::string schema =
      R"({"type":"object","properties":{"s":{"type":"string","maxLength":5},"n":{"type":"integer","minimum":-20,)"
      R"("maximum":300},"e":{"enum":["x",1,null]}},"required":["s","n","e"],"additionalProperties":false})";
  for (uint32_t seed = 0; seed < 50; ++seed)
    EXPECT_TRUE(matches(Kind::kJsonSchema, schema, random_text(Kind::kJsonSchema, schema, seed)));
}

// Also after the end token.
TEST_F(GrammarTest, ARolledBackMatcherIsThatOfTheTokensBefore) {
  const std::string schema =
      R"({"type":"object","properties":{"s":{"type":"string","maxLength":5},"n":{"type":"integer","minimum":-20,)"
      R"("maximum":300},"e":{"enum":["x",1,null]}},"required":["s","n","e"],"additionalProperties":false})";
  std::mt19937 random(1);
  int num_ended = 0;
  for (int text = 0; text < 30; ++text) {
    const auto m = matcher(Kind::kJsonSchema, schema);
    std::vector<int32_t> taken;
    while (!m->has_ended()) {
      const std::vector<int32_t> allowed = allowed_ids(*m);
      int64_t num_ahead = 0;
      for (const auto most = static_cast<int64_t>(random() % 6); num_ahead < most && !m->has_ended();
           ++num_ahead) {
        const std::vector<int32_t> ids = allowed_ids(*m);
        ASSERT_TRUE(m->accept(ids[random() % ids.size()], kAcceptBudget).ok());
      }
      num_ended += m->has_ended() ? 1 : 0;
      m->rollback(num_ahead);
      ASSERT_FALSE(m->has_ended());
      ASSERT_EQ(allowed_ids(*m), allowed);
      const auto fresh = matcher(Kind::kJsonSchema, schema);
      for (const int32_t id : taken) ASSERT_TRUE(fresh->accept(id, kAcceptBudget).ok());
      ASSERT_EQ(allowed_ids(*fresh), allowed);
      taken.push_back(allowed[random() % allowed.size()]);
      ASSERT_TRUE(m->accept(taken.back(), kAcceptBudget).ok());
    }
  }
  EXPECT_GT(num_ended, 10);
}

// Special tokens have no text: regular expressions never allow them, but a structural tag can name one.
TEST_F(GrammarTest, ATagAllowsASpecialToken) {
  const auto compiler = make_grammar_compiler(tokenizer_, kVocab, {kFirstWordId});
  const auto grammar = compiler->compile(
      {Kind::kStructuralTag,
       R"({"type":"structural_tag","format":{"type":"sequence","elements":[{"type":"any_tokens","exclude_tokens":[98,256]},)"
       R"({"type":"token","token":256},{"type":"const_string","value":"x"}]}})"},
      kCompileBudget);
  ASSERT_TRUE(grammar.ok()) << grammar.status().to_string();
  const auto m = (*grammar)->make_matcher();
  ASSERT_TRUE(m->accept('a', kAcceptBudget).ok());
  const std::vector<int32_t> allowed = allowed_ids(*m);
  EXPECT_TRUE(std::find(allowed.begin(), allowed.end(), 256) != allowed.end());
  EXPECT_TRUE(std::find(allowed.begin(), allowed.end(), 'c') != allowed.end());
  EXPECT_TRUE(std::find(allowed.begin(), allowed.end(), 'b') == allowed.end());
  EXPECT_TRUE(m->accept(256, kAcceptBudget).ok());
  EXPECT_EQ(allowed_ids(*m), std::vector<int32_t>{'x'});
  const auto text = compiler->compile({Kind::kRegex, "(.|\\n)*"}, kCompileBudget);
  ASSERT_TRUE(text.ok()) << text.status().to_string();
  const std::vector<int32_t> of_text = allowed_ids(*(*text)->make_matcher());
  EXPECT_TRUE(std::find(of_text.begin(), of_text.end(), 'c') != of_text.end());
  EXPECT_TRUE(std::find(of_text.begin(), of_text.end(), 256) == of_text.end());
}

TEST_F(GrammarTest, AStructuralTagNamesTokens) {
  const std::string tag =
      R"({"type":"structural_tag","format":{"type":"sequence","elements":[{"type":"token","token":257},)"
      R"({"type":"json_schema","json_schema":{"type":"integer"}}]}})";
  const auto m = matcher(Kind::kStructuralTag, tag);
  EXPECT_EQ(allowed_ids(*m), std::vector<int32_t>{kFirstWordId});
  EXPECT_TRUE(m->accept(kFirstWordId, kAcceptBudget).ok());
  EXPECT_TRUE(m->accept('7', kAcceptBudget).ok());
  EXPECT_TRUE(m->accept(kEosId, kAcceptBudget).ok());
}

TEST_F(GrammarTest, WithoutEndTokensTheTextsEndIsTheEnd) {
  const auto compiler = make_grammar_compiler(tokenizer_, kVocab, {});
  const auto grammar = compiler->compile({Kind::kRegex, "ab"}, kCompileBudget);
  ASSERT_TRUE(grammar.ok());
  const auto m = (*grammar)->make_matcher();
  EXPECT_TRUE(m->accept('a', kAcceptBudget).ok());
  EXPECT_FALSE(m->has_ended());
  EXPECT_TRUE(m->accept('b', kAcceptBudget).ok());
  EXPECT_TRUE(m->has_ended());
}

TEST_F(GrammarTest, WhatIsWrongIsSaid) {
  EXPECT_NE(error(Kind::kRegex, "a(b"), "");
  EXPECT_NE(error(Kind::kEbnf, "root ::= nothing"), "");
  EXPECT_NE(error(Kind::kJsonSchema, "{"), "");
  EXPECT_NE(error(Kind::kJsonSchema, R"({"type":"text"})"), "");
  EXPECT_NE(error(Kind::kStructuralTag, "{}"), "");
  EXPECT_NE(error(Kind::kRegex, std::string(100000, '(')).find("nests deeper"), std::string::npos);
}

// The compiler refuses keywords that it would ignore: a refusal is better than text that violates the schema.
TEST_F(GrammarTest, WhatWouldBeIgnoredIsRefused) {
  EXPECT_NE(error(Kind::kJsonSchema, R"({"type":"array","items":{"type":"integer"},"uniqueItems":true})")
                .find("uniqueItems"),
            std::string::npos);
  EXPECT_NE(error(Kind::kJsonSchema, R"({"type":"number","multipleOf":0.5})").find("multipleOf"),
            std::string::npos);
  EXPECT_NE(error(Kind::kJsonSchema, R"({"not":{"type":"null"}})").find("not"), std::string::npos);
}

TEST_F(GrammarTest, AGrammarSaysItsSize) {
  const auto grammar = compiler_->compile({Kind::kRegex, "[a-z]{3}"}, kCompileBudget);
  ASSERT_TRUE(grammar.ok());
  EXPECT_GT((*grammar)->num_bytes(), 0);
}

// Token ids that a mask must try one by one are cached per state, so they count toward a grammar's size.
TEST_F(GrammarTest, MasksOfBoundedStringsTryFewIds) {
  std::mt19937 random(1);
  std::set<std::string> words;
  while (words.size() < 3000) {
    std::string word;
    for (uint32_t length = 30 + random() % 8; length > 0; --length)
      word += static_cast<char>('a' + random() % 26);
    words.insert(word);
  }
  const Tokenizer tokenizer = fake_tokenizer({words.begin(), words.end()});
  const auto compiler = make_grammar_compiler(tokenizer, 3300, {kEosId});
  const auto grammar = compiler->compile(
      {Kind::kJsonSchema, R"({"type":"object","required":["a","b","c"],"properties":{"a":{"type":"string",)"
                          R"("maxLength":40},"b":{"type":"string","maxLength":40},"c":{"type":"array",)"
                          R"("items":{"type":"string","maxLength":40},"maxItems":3}}})"},
      kCompileBudget);
  ASSERT_TRUE(grammar.ok()) << grammar.status().to_string();
  EXPECT_LT((*grammar)->num_bytes(), 250'000) << "it takes 530 KB if each string caches its ids";
}

}  // namespace
}  // namespace fp4moe
