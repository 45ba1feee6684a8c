#include "engine/output/output_text.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "engine/fake_tokenizer.h"

namespace fp4moe {
namespace {

struct Outcome {
  std::string text, matched;
  bool operator==(const Outcome&) const = default;
};

// Pushes `text` in pieces that end at the given cuts.
Outcome match(const std::vector<std::string>& stops, std::string_view text,
              const std::vector<size_t>& cuts = {}) {
  StopMatcher matcher(stops);
  Outcome outcome;
  size_t begin = 0;
  for (const size_t cut : cuts) {
    outcome.text += matcher.push(text.substr(begin, cut - begin));
    begin = cut;
  }
  outcome.text += matcher.push(text.substr(begin));
  outcome.text += matcher.finish();
  outcome.matched = matcher.matched();
  return outcome;
}

// The definition: the match that ends first; among several, the longest.
Outcome match_naively(const std::vector<std::string>& stops, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::string longest;
    for (const std::string& stop : stops)
      if (stop.size() > longest.size() && text.substr(0, end).ends_with(stop)) longest = stop;
    if (!longest.empty()) return {text.substr(0, end - longest.size()), longest};
  }
  return {text, ""};
}

TEST(StopMatcher, OverThreePieces) {
  EXPECT_EQ(match({"STOP"}, "aSTOPb", {2, 3, 4}), (Outcome{"a", "STOP"}));
}

TEST(StopMatcher, HoldsBackOnlyWhatMayBecomeAStop) {
  StopMatcher matcher({"\n\n"});
  EXPECT_EQ(matcher.push("one\n"), "one");
  EXPECT_EQ(matcher.push("two"), "\ntwo");
  EXPECT_EQ(matcher.push("\n"), "");
  EXPECT_EQ(matcher.finish(), "\n");
  EXPECT_EQ(matcher.matched(), "");
}

TEST(StopMatcher, OverlappingStops) {
  EXPECT_EQ(match({"abcd", "bc"}, "xabcd"), (Outcome{"xa", "bc"}));  // "bc" is complete first
  EXPECT_EQ(match({"c", "abc"}, "xabcd"), (Outcome{"x", "abc"}));    // both end at c: the longest
  EXPECT_EQ(match({"aab"}, "aaab"), (Outcome{"a", "aab"}));          // restarts inside itself
  EXPECT_EQ(match({"abcabd"}, "abcabcabd"), (Outcome{"abc", "abcabd"}));
}

TEST(StopMatcher, AtTheFirstByteAndNothingAfterwards) {
  StopMatcher matcher({"a"});
  EXPECT_EQ(matcher.push("ab"), "");
  EXPECT_EQ(matcher.push("cd"), "");
  EXPECT_EQ(matcher.finish(), "");
  EXPECT_EQ(matcher.matched(), "a");
}

RC_GTEST_PROP(StopMatcher, IsTheDefinitionWhateverTheCuts, ()) {
  const auto word = [](int low, int high) {
    return rc::gen::resize(
        high, rc::gen::suchThat(rc::gen::container<std::string>(rc::gen::element('a', 'b', 'c')),
                                [=](const std::string& s) { return static_cast<int>(s.size()) >= low; }));
  };
  const auto stops = *rc::gen::resize(4, rc::gen::container<std::vector<std::string>>(word(1, 4)));
  const std::string text = *word(0, 40);
  auto cuts = *rc::gen::container<std::vector<size_t>>(rc::gen::inRange<size_t>(0, text.size() + 1));
  std::sort(cuts.begin(), cuts.end());
  RC_ASSERT(match(stops, text, cuts) == match_naively(stops, text));
}

TEST(OutputText, PiecesAreWholeCharacters) {
  const Tokenizer tokenizer = fake_tokenizer();
  OutputText text(tokenizer, true, {"é!"});
  EXPECT_EQ(text.push(0xc3), "");
  EXPECT_EQ(text.push(0xa9), "");  // could be the start of the stop string
  EXPECT_EQ(text.push('x'), "éx");
  EXPECT_EQ(text.push(0xc3), "");
  EXPECT_EQ(text.finish(), "\xef\xbf\xbd");
  EXPECT_EQ(text.matched_stop(), "");
}

}  // namespace
}  // namespace fp4moe
