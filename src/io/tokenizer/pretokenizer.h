// Splits text into words according to tokenizer.json's "pre_tokenizer". Byte-pair encoding never crosses
// word boundaries.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"
#include "io/tokenizer/split_pattern.h"
#include "io/tokenizer/tokenizer_json.h"

namespace fp4moe {

// How a pattern's matches are joined with the text between them.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

class PreTokenizer {
 public:
  // kInvalidArgument, kUnsupported: as in Tokenizer::parse. The configuration must end with ByteLevel.
  static Result<PreTokenizer> parse(const JsonCursor& pre_tokenizer);

  // Splits with one pattern, given as for translate_pattern().
  static Result<PreTokenizer> from_pattern(std::string_view pattern);

  // Whether a step removes text.
  bool drops_text() const;

  using Visit = std::function<Status(std::string_view word)>;
  // Calls `visit` for the words of `text` (non-empty valid UTF-8) as raw bytes; stops at the first error.
  // Words point into `text` or into strings appended to `storage`. Words are not collected: a text can have
  // as many words as bytes. kDoesNotFit: as in SplitPattern::for_each.
  Status split(std::string_view text, std::deque<std::string>* storage, const Visit& visit) const;

 private:
  struct Step {
    SplitPattern pattern;
    SplitBehavior behavior;
    bool invert;  // swaps matches and the text between them
  };
  struct Piece {
    std::string_view text;
    const char* shown;  // the text that patterns match: same length, newer characters replaced
  };
  Status add_step(const JsonCursor& config);
  Status add_pattern(const JsonCursor& config, const std::string& pattern, SplitBehavior behavior,
                     bool invert);
  Status add_split(const JsonCursor& config);
  Status add_byte_level(const JsonCursor& config);
  struct Call;
  Status split_piece(size_t step, Piece piece, Call* call) const;

  std::vector<Step> steps_;
  bool has_byte_level_ = false;
  size_t prefix_before_ = SIZE_MAX;  // each piece gets a leading space before this step
};

}  // namespace fp4moe
