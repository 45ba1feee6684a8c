// Regular expressions in tokenizer.json: written for Oniguruma, executed by PCRE2 with the same results.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Translates `pattern` from Oniguruma's default syntax to PCRE2. kUnsupported, naming the construct, if
// the two interpret it differently and no known tokenizer uses it; PCRE2 reports syntax errors.
Result<std::string> translate_pattern(std::string_view pattern);
// Returns a pattern that matches `text` literally.
std::string escape_pattern(std::string_view text);

// A compiled pattern. Immutable; for_each and find_all may run on many threads at once.
class SplitPattern {
 public:
  using Range = std::pair<uint32_t, uint32_t>;  // bytes [first, second)

  // Takes PCRE2 syntax. kInvalidArgument, with PCRE2's reason and the position, if it does not compile.
  static Result<SplitPattern> compile(const std::string& pcre_pattern);
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  // Calls `visit` for each match from left to right, skipping an empty match directly after another match.
  // Stops at the first error that `visit` returns. `text` is valid UTF-8 below 2 GiB. kDoesNotFit if a match
  // takes too many steps.
  Status for_each(std::string_view text, const std::function<Status(Range)>& visit) const;
  // Replaces the contents of *matches.
  Status find_all(std::string_view text, std::vector<Range>* matches) const;

 private:
  struct Code;
  explicit SplitPattern(std::unique_ptr<Code> code);
  std::unique_ptr<Code> code_;
};

}  // namespace fp4moe
