// AnswerText: the text of one answer as it grows, with stop strings found and held back.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/stop_regex.h"
#include "io/tokenizer.h"

namespace fp4moe {

// Finds the first of several stop strings to be complete in a text that comes in pieces; of those that
// end at the same byte the longest. What it gives does not depend on where the pieces were cut.
class StopMatcher {
 public:
  // Stop strings are valid UTF-8 and not empty.
  explicit StopMatcher(const std::vector<std::string>& stops);

  // Takes the next piece and returns the text that no stop string can reach any more: it holds no part of
  // one, and is whole UTF-8 if the pieces are. After a match, nothing further is taken.
  std::string push(std::string_view piece);
  // What was held back; empty after a match.
  std::string finish();
  // The stop string found, or empty.
  const std::string& matched() const { return matched_; }

 private:
  struct Pattern {
    std::string text;
    std::vector<size_t> fallback;  // [n]: longest proper border of text[0..n] (Knuth, Morris, Pratt)
    size_t num_matched = 0;        // longest prefix of text that the input ends with
    void advance(char c);
  };
  std::vector<Pattern> patterns_;
  std::string held_;  // the end of the input that may be the start of a stop string
  std::string matched_;
};

// Stop strings are found first: expressions see the text that they leave.
class AnswerText {
 public:
  AnswerText(const Tokenizer& tokenizer, bool skip_special_tokens, const std::vector<std::string>& stops,
             StopPatterns patterns = {})
      : detokenizer_(tokenizer, skip_special_tokens),
        stop_matcher_(stops),
        stop_regex_(std::move(patterns)) {}
  // The text that became certain. Unless it may stop, a stop string that began before or in it is text.
  std::string push(int32_t token_id, bool may_stop = true);
  // The rest, at the end of the answer.
  std::string finish();
  // Whether the text has come to its end, at what, and why it cannot go on.
  bool is_stopped() const { return stop_regex_.has_matched() || !stop_matcher_.matched().empty(); }
  const std::string& matched_stop() const {
    return stop_regex_.has_matched() ? stop_regex_.matched() : stop_matcher_.matched();
  }
  const Status& failure() const { return stop_regex_.failure(); }

 private:
  IncrementalDetokenizer detokenizer_;
  StopMatcher stop_matcher_;
  StopRegex stop_regex_;
};

}  // namespace fp4moe
