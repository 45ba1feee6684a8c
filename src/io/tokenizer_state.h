// What a Tokenizer holds. Only for tokenizer.cc and tokenizer_parse.cc.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/added_tokens.h"
#include "io/bpe.h"
#include "io/pretokenizer.h"
#include "io/tokenizer.h"

namespace fp4moe {

struct Tokenizer::State {
  struct Token {
    std::string bytes;  // what the id decodes to
    bool exists = false;
    bool special = false;
  };

  State(BpeModel bpe, PreTokenizer pre) : model(std::move(bpe)), pre_tokenizer(std::move(pre)) {}

  BpeModel model;
  PreTokenizer pre_tokenizer;
  bool normalize = false;                           // to Form C
  AddedTokenMatcher raw_tokens, normalized_tokens;  // searched for before and after normalization
  BpeModel::Vocab added_ids;
  std::vector<int32_t> prefix, suffix;  // the post-processor's special tokens
  bool decode_byte_level = false;       // else tokens are text as they stand
  bool join_with_space = false;         // what Hugging Face does where there is no decoder
  bool drops_text = false;              // some text has no token at all
  std::vector<Token> tokens;            // [vocab_size]

  // Steps of Tokenizer::parse, after the model and the pre-tokenizer.
  Status parse_normalizer(const JsonCursor& normalizer);
  Status parse_post_processor(const JsonCursor& post_processor);
  Status parse_template(const JsonCursor& config);
  Status parse_decoder(const JsonCursor& decoder);
  // Fills tokens from the vocabulary and the added ones. The decoder must be known.
  void index_tokens(std::vector<AddedToken> added);

  // Cuts valid UTF-8 into added tokens and (normalized) text, which may point into `storage`.
  void split(std::string_view text, std::deque<std::string>* storage, std::vector<Segment>* segments) const;

  // Appends the ids of text between added tokens. Strings that `cache` points into go to storage.
  struct EncodeCall;
  Status encode_segment(std::string_view text, EncodeCall* call) const;
  void encode_word(std::string_view word, EncodeCall* call) const;
};

}  // namespace fp4moe
