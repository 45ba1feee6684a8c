// The state of a Tokenizer. Only for tokenizer.cc and tokenizer_parse.cc.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/tokenizer/added_tokens.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/pretokenizer.h"
#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

struct Tokenizer::State {
  struct Token {
    std::string bytes;  // the decoded bytes
    bool exists = false;
    bool special = false;
  };

  State(BpeModel bpe, PreTokenizer pre) : model(std::move(bpe)), pre_tokenizer(std::move(pre)) {}

  BpeModel model;
  PreTokenizer pre_tokenizer;
  bool normalize = false;                           // to Form C
  AddedTokenMatcher raw_tokens, normalized_tokens;  // matched before and after normalization
  BpeModel::Vocab added_ids;
  std::vector<int32_t> prefix, suffix;  // the post-processor's special tokens
  bool decode_byte_level = false;       // false: token strings are plain text
  bool join_with_space = false;         // Hugging Face's behavior without a decoder
  bool drops_text = false;              // some text produces no token
  std::vector<Token> tokens;            // [vocab_size]

  // Steps of Tokenizer::parse, after those for the model and the pre-tokenizer.
  Status parse_normalizer(const JsonCursor& normalizer);
  Status parse_post_processor(const JsonCursor& post_processor);
  Status parse_template(const JsonCursor& config);
  Status parse_decoder(const JsonCursor& decoder);
  // Fills `tokens` from the vocabulary and the added tokens. Call it after parse_decoder().
  void index_tokens(std::vector<AddedToken> added);

  // Splits valid UTF-8 into added tokens and (normalized) text, which may point into `storage`.
  void split(std::string_view text, std::deque<std::string>* storage, std::vector<Segment>* segments) const;

  // Appends the ids of text between added tokens; keeps strings that the cache points into in call->storage.
  struct EncodeCall;
  Status encode_segment(std::string_view text, EncodeCall* call) const;
  void encode_word(std::string_view word, EncodeCall* call) const;
};

}  // namespace fp4moe
