// tokenizer.json's "added_tokens": tokens that are matched in the text before byte-pair encoding.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/tokenizer_json.h"

namespace fp4moe {

struct AddedToken {
  int32_t id = -1;
  std::string content;  // as in the file
  std::string pattern;  // the text to match: content, normalized if `normalized`
  bool special = false, normalized = false, single_word = false, lstrip = false, rstrip = false;
};

// A part of a text: an added token, or text between added tokens.
struct Segment {
  std::string_view text;
  int32_t id;  // -1: text
};

// The added tokens that are matched in one pass.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher() = default;
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);
  // Appends the segments of `text`, which is valid UTF-8. Scans left to right and takes the longest token at
  // each position, including the white space that the token strips. Text segments are never empty.
  void split(std::string_view text, std::vector<Segment>* segments) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  // Returns the longest token with which `text` starts, or null.
  const AddedToken* longest_prefix(std::string_view text) const;

  std::vector<AddedToken> tokens_;       // sorted by pattern
  std::vector<uint32_t> first_of_byte_;  // [257]: tokens_[[b]] to tokens_[[b + 1] - 1] start with byte b
};

// kInvalidArgument: as in Tokenizer::parse, and for an id that is neither the vocabulary's id for the content
// nor, for new content, the next free id: Hugging Face would silently use that id instead of the file's.
Result<std::vector<AddedToken>> parse_added_tokens(const JsonCursor& added_tokens,
                                                   const BpeModel::Vocab& vocab, bool normalize);

}  // namespace fp4moe
