// StopRegex: finds where a regular expression first matches a text that grows.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Compiled expressions (PCRE2, Unicode), shared by whoever matches them.
class StopPatterns {
 public:
  // kInvalidArgument names the expression: it does not compile, or matches the empty text.
  static Result<StopPatterns> compile(const std::vector<std::string>& expressions);
  StopPatterns() = default;  // none

 private:
  friend class StopRegex;
  struct Code;
  std::vector<std::shared_ptr<const Code>> codes_;
};

// The text ends at the first character at which an expression matches; of matches that end there the one that
// begins first counts. What it gives does not depend on where the pieces were cut. A match takes a bounded
// number of steps; where they do not suffice, failure() says so.
class StopRegex {
 public:
  explicit StopRegex(StopPatterns patterns);

  // Takes the next piece, whole UTF-8, and returns the text that no match can reach any more: nothing of what
  // an expression matches. After a match or a failure, nothing further is taken.
  std::string push(std::string_view piece);
  // Text in which no match may begin; it comes before all that is pushed.
  void pass(std::string_view text);
  // What was held back; empty after a match.
  std::string finish();

  const std::string& matched() const { return matched_; }  // empty: nothing yet
  bool has_matched() const { return has_matched_; }
  const Status& failure() const { return failure_; }

 private:
  void look();

  StopPatterns patterns_;
  std::string text_;     // all of it: expressions may look back
  size_t certain_ = 0;   // bytes of it that were given away
  std::string matched_;  // may be empty where \K moves a match's beginning
  bool has_matched_ = false;
  Status failure_;
};

}  // namespace fp4moe
