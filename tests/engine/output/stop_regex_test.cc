#include "engine/output/stop_regex.h"

#include <gtest/gtest.h>

#include <random>
#include <regex>

namespace fp4moe {
namespace {

struct Outcome {
  std::string text, matched;
  bool operator==(const Outcome&) const = default;
};
void PrintTo(const Outcome& outcome, std::ostream* out) {
  *out << '"' << outcome.text << "\" before \"" << outcome.matched << '"';
}

StopPatterns compiled(const std::vector<std::string>& expressions) {
  Result<StopPatterns> patterns = StopPatterns::compile(expressions);
  EXPECT_TRUE(patterns.ok()) << patterns.status().to_string();
  return patterns.ok() ? *patterns : StopPatterns();
}

// Pushes `text` in pieces of up to `most` bytes.
Outcome match(const std::vector<std::string>& expressions, const std::string& text, size_t most = 1000) {
  StopRegex regex(compiled(expressions));
  Outcome outcome;
  for (size_t i = 0; i < text.size(); i += most) outcome.text += regex.push(text.substr(i, most));
  outcome.text += regex.finish();
  outcome.matched = regex.matched();
  EXPECT_TRUE(regex.failure().ok()) << regex.failure().to_string();
  return outcome;
}

// The definition, with the standard library's engine: the first prefix of the text that contains a match, and
// among its matches the one that begins first.
Outcome match_naively(const std::vector<std::regex>& expressions, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    const std::string prefix = text.substr(0, end);
    size_t begin = end;
    for (const std::regex& expression : expressions) {
      std::smatch found;
      if (std::regex_search(prefix, found, expression))
        begin = std::min(begin, static_cast<size_t>(found.position(0)));
    }
    if (begin < end) return {prefix.substr(0, begin), prefix.substr(begin)};
  }
  return {text, ""};
}

// Uses 'a' to 'c', groups, alternatives and repetitions, but no nested repetitions, which backtrack
// exponentially.
std::string random_expression(std::mt19937& generator, int depth, bool repeats) {
  std::string expression;
  for (unsigned i = 0, parts = 1 + generator() % 3; i < parts; ++i) {
    const unsigned kind = generator() % (depth > 0 ? 8 : 5);
    if (kind < 3) expression += std::string(1, static_cast<char>('a' + kind));
    if (kind == 3) expression += "[ab]";
    if (kind == 4) expression += "[^a]";
    if (kind >= 5)
      expression += "(" + random_expression(generator, depth - 1, false) + "|" +
                    random_expression(generator, depth - 1, false) + ")";
    static const char* kRepeats[] = {"", "", "", "?", "*", "+", "{2}", "+?", "{1,3}"};
    if (repeats) expression += kRepeats[generator() % 9];
  }
  return expression;
}

TEST(StopRegex, MeetsTheDefinitionForRandomExpressionsAndCuts) {
  std::mt19937 generator(3);
  int num_matched = 0;
  for (int round = 0; round < 1500; ++round) {
    std::vector<std::string> expressions;
    std::vector<std::regex> naive;
    while (expressions.size() < 1 + static_cast<size_t>(round) % 3) {
      const std::string expression = random_expression(generator, 2, true);
      if (std::regex_match("", std::regex(expression))) continue;
      expressions.push_back(expression);
      naive.emplace_back(expression);
    }
    std::string text;
    for (int i = 0; i < 14; ++i) text += static_cast<char>('a' + generator() % 3);
    const Outcome expected = match_naively(naive, text);
    num_matched += !expected.matched.empty();
    for (const size_t most : {1, 2, 3, 14})
      ASSERT_EQ(match(expressions, text, most), expected)
          << expressions.front() << ", first of " << expressions.size() << ", on " << text << " by " << most;
  }
  EXPECT_GT(num_matched, 500);
  EXPECT_LT(num_matched, 1490);
}

TEST(StopRegex, HoldsBackOnlyWhatMayBeginAMatch) {
  StopRegex regex(compiled({"END-[0-9]+;"}));
  EXPECT_EQ(regex.push("one E"), "one ");
  EXPECT_EQ(regex.push("N"), "");
  EXPECT_EQ(regex.push("Oh EN"), "ENOh ");
  EXPECT_EQ(regex.push("D-12"), "");
  EXPECT_FALSE(regex.has_matched());
  EXPECT_EQ(regex.push("3; and"), "");
  EXPECT_EQ(regex.matched(), "END-123;");
  EXPECT_EQ(regex.push("more"), "");
  EXPECT_EQ(regex.finish(), "");
}

TEST(StopRegex, FinishGivesWhatWasHeldBack) {
  StopRegex regex(compiled({"abc"}));
  EXPECT_EQ(regex.push("xab"), "x");
  EXPECT_EQ(regex.finish(), "ab");
  EXPECT_EQ(regex.finish(), "");
}

TEST(StopRegex, LooksBackAtWhatWasGiven) {
  EXPECT_EQ(match({"(?<=one )two"}, "two one two", 1), (Outcome{"two one ", "two"}));
  EXPECT_EQ(match({"^two"}, "one two", 1), (Outcome{"one two", ""}));
  EXPECT_EQ(match({"(?m)^two"}, "one\ntwo", 1), (Outcome{"one\n", "two"}));
  EXPECT_EQ(match({"one\\K two"}, "one two", 1), (Outcome{"one", " two"}));
}

TEST(StopRegex, CharactersAreWhole) {
  EXPECT_EQ(match({"."}, "\xE2\x82\xAC"), (Outcome{"", "\xE2\x82\xAC"}));
  EXPECT_EQ(match({"\\w\\W"}, "\xC3\xBC\xC3\x9F!"), (Outcome{"\xC3\xBC", "\xC3\x9F!"}));
}

TEST(StopRegex, PassedTextIsContextOnly) {
  StopRegex regex(compiled({"(?<=b)c|ab"}));
  regex.pass("ab");
  EXPECT_EQ(regex.push("xab"), "x");
  EXPECT_EQ(regex.matched(), "ab");
}

TEST(StopRegex, NoneGivesEverythingAtOnce) {
  StopRegex regex(StopPatterns{});
  EXPECT_EQ(regex.push("text"), "text");
  EXPECT_EQ(regex.finish(), "");
}

TEST(StopRegex, RefusesWhatDoesNotCompileOrEndsAtOnce) {
  const auto refusal = [](const std::string& expression) {
    return StopPatterns::compile({"ok", expression}).status().message();
  };
  EXPECT_EQ(refusal("(a"), "stop_regex[1] does not compile: missing closing parenthesis at byte 2");
  EXPECT_NE(refusal("\xff").find("stop_regex[1] does not compile: UTF-8 error"), std::string::npos);
  EXPECT_NE(refusal("a\\C").find("does not compile"), std::string::npos);
  for (const char* empty : {"a*", "", "(?=a)", "^", "x|"})
    EXPECT_EQ(refusal(empty), "stop_regex[1] matches the empty text: the output would end before it begins");
}

// An expression whose time per character is linear in the held-back text must not fail after 1000 characters.
TEST(StopRegex, LongTextMayBeHeldBack) {
  for (const std::string expression : {"<t>(.|\\n)*</t>", "<t>[^y]*</t>", "<t>.*?</t>"}) {
    StopRegex regex(compiled({expression}));
    regex.push("<t>");
    for (int i = 0; i < 1000; ++i) EXPECT_EQ(regex.push(i % 2 == 0 ? "x" : "z"), "");
    EXPECT_TRUE(regex.failure().ok()) << regex.failure().to_string();
    regex.push("</t>");
    EXPECT_TRUE(regex.has_matched()) << expression;
  }
}

// All expressions share one time limit: eight expressions fail after fewer bytes than one.
TEST(StopRegex, ExpressionsShareTheLimit) {
  const auto bytes_until_failure = [](size_t num_expressions) {
    StopRegex regex(compiled(std::vector<std::string>(num_expressions, "<t>(.|\\n)*</t>")));
    regex.push("<t>");
    int64_t num_bytes = 0;
    while (regex.failure().ok() && num_bytes < 100'000) regex.push("x"), ++num_bytes;
    return num_bytes;
  };
  const int64_t of_one = bytes_until_failure(1), of_eight = bytes_until_failure(8);
  EXPECT_GT(of_one, 2000);
  EXPECT_LT(of_eight, of_one / 4);
}

TEST(StopRegex, AnExpressionThatExplodesFails) {
  StopRegex regex(compiled({"(a+)+b"}));
  for (int i = 0; i < 100 && regex.failure().ok(); ++i) regex.push("a");
  EXPECT_EQ(regex.failure().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(regex.failure().message().find("stop_regex[0], with"), std::string::npos);
  EXPECT_NE(regex.failure().message().find("match limit exceeded"), std::string::npos)
      << regex.failure().message();
  EXPECT_EQ(regex.push("b"), "");
}

}  // namespace
}  // namespace fp4moe
