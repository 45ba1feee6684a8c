// StopRegex: finds where a regular expression first matches in a growing text.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Compiled expressions (PCRE2, Unicode); copies share the compiled code.
class StopPatterns {
 public:
  // kInvalidArgument names the expression: it does not compile, or can match the empty text.
  static Result<StopPatterns> compile(const std::vector<std::string>& expressions);
  StopPatterns() = default;  // no expressions

 private:
  friend class StopRegex;
  struct Code;
  std::vector<std::shared_ptr<const Code>> codes_;
};

// The text ends at the first character at which an expression matches; among matches that end there, the one
// that begins first counts. The result does not depend on how the text was split into pieces. Each search may
// take a limited number of steps; a search that exceeds the limit sets failure().
class StopRegex {
 public:
  explicit StopRegex(StopPatterns patterns);

  // Appends a piece of whole UTF-8 characters and returns the text that can no longer be part of a match;
  // matched text is never returned. After a match or a failure, pieces are ignored.
  std::string push(std::string_view piece);
  // Appends text in which no match can begin or end. Call before later pieces.
  void pass(std::string_view text);
  // Returns the text held back; empty after a match.
  std::string finish();

  const std::string& matched() const { return matched_; }        // empty: no match yet
  const std::string& expression() const { return expression_; }  // that matched; empty: no match yet
  bool has_matched() const { return has_matched_; }
  const Status& failure() const { return failure_; }

 private:
  void look();

  StopPatterns patterns_;
  std::string text_;     // the whole text, because expressions can look behind
  size_t certain_ = 0;   // number of its bytes already returned
  std::string matched_;  // may be empty if \K moves the start of a match
  std::string expression_;
  bool has_matched_ = false;
  Status failure_;
};

}  // namespace fp4moe
