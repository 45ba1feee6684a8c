// OutputText: the text of one output as it grows, with stop strings detected and held back.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/output/stop_regex.h"
#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

// Finds the stop string that is completed first in a text that arrives in pieces. If several end at the same
// byte, the longest one wins. The result does not depend on how the text was split into pieces.
class StopMatcher {
 public:
  // Stop strings must be valid UTF-8 and not empty.
  explicit StopMatcher(const std::vector<std::string>& stops);

  // Appends a piece and returns the text that can no longer be part of a stop string; whole UTF-8 characters
  // if the pieces are. After a match, pieces are ignored.
  std::string push(std::string_view piece);
  // Returns the text held back; empty after a match.
  std::string finish();
  // The stop string that matched, or empty.
  const std::string& matched() const { return matched_; }

 private:
  struct Pattern {
    std::string text;
    std::vector<size_t> fallback;  // [n]: longest proper border of text[0..n] (Knuth, Morris, Pratt)
    size_t num_matched = 0;        // longest prefix of text that the input ends with
    void advance(char c);
  };
  std::vector<Pattern> patterns_;
  std::string held_;  // the end of the input; may be the start of a stop string
  std::string matched_;
};

// Stop strings are matched first; regular expressions see only the text that the stop matcher releases.
class OutputText {
 public:
  OutputText(const Tokenizer& tokenizer, bool skip_special_tokens, const std::vector<std::string>& stops,
             StopPatterns patterns = {})
      : detokenizer_(tokenizer, skip_special_tokens),
        stop_matcher_(stops),
        stop_regex_(std::move(patterns)) {}
  // Returns the text that has become final. With may_stop false, the token's text is final at once: no stop
  // string or match of an expression can begin or end in it.
  std::string push(int32_t token_id, bool may_stop = true);
  // Returns the remaining text at the end of the output.
  std::string finish();
  // Whether a stop string or expression has matched, which text matched, and any error.
  bool is_stopped() const { return stop_regex_.has_matched() || !stop_matcher_.matched().empty(); }
  // The text that ended the output, and the stop string or expression that it matched.
  const std::string& stop_pattern() const {
    return stop_regex_.has_matched() ? stop_regex_.expression() : stop_matcher_.matched();
  }
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
