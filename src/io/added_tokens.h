// tokenizer.json's "added_tokens": tokens found in the text before any of it reaches byte-pair encoding.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"
#include "io/bpe.h"
#include "io/tokenizer_json.h"

namespace fp4moe {

struct AddedToken {
  int32_t id;
  std::string content;  // as the file has it
  std::string pattern;  // what the text is searched for: content, normalized if `normalized`
  bool special, normalized, single_word, lstrip, rstrip;
};

// A part of a text: a token, or text between tokens.
struct Segment {
  std::string_view text;
  int32_t id;  // -1: text
};

// The added tokens that are searched for in one pass.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher() = default;
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);
  // Appends the segments of `text`, valid UTF-8: at each place from left to right the longest token, with the
  // white space it strips. Segments of text are never empty.
  void split(std::string_view text, std::vector<Segment>* segments) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  // The longest token that `text` starts with, or null.
  const AddedToken* longest_prefix(std::string_view text) const;

  std::vector<AddedToken> tokens_;       // sorted by pattern
  std::vector<uint32_t> first_of_byte_;  // [257]: tokens whose pattern starts with byte b are [b], [b + 1)
};

// kInvalidArgument: as Tokenizer::parse, and for an id that is not the vocabulary's for that content or, for
// new content, the next free one: Hugging Face would silently use those instead of the file's.
Result<std::vector<AddedToken>> parse_added_tokens(const JsonCursor& added_tokens,
                                                   const BpeModel::Vocab& vocab, bool normalize);

}  // namespace fp4moe
