// Tokenizer: byte-level BPE as configured by tokenizer.json, with the same ids as Hugging Face tokenizers, or
// by tiktoken.model, with the same ids as tiktoken.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Returns the file that defines the tokenizer: `path` itself, or a folder's tokenizer.json or, if there is
// only that, tiktoken.model.
std::string tokenizer_file(const std::string& path);

class Tokenizer {
 public:
  // `json` is tokenizer.json's content. kDataLoss (not JSON), kInvalidArgument (malformed; names the key),
  // kUnsupported (an unimplemented model, normalizer, pre-tokenizer or decoder that would change ids or text;
  // names it).
  static Result<Tokenizer> parse(std::string_view json);
  // `ranks` is tiktoken.model's content and `config_json` that of tokenizer_config.json beside it. Errors as
  // in parse(), and kDataLoss for a malformed tiktoken.model (names the line).
  static Result<Tokenizer> parse_tiktoken(std::string_view ranks, std::string_view config_json);
  // Parses tokenizer_file(path): a file named tiktoken.model with parse_tiktoken(), others with parse().
  static Result<Tokenizer> load(const std::string& path);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Accepts any bytes (invalid UTF-8 becomes U+FFFD, as in a lossy decode). Recognises special tokens in the
  // text. add_special_tokens applies the post-processor's template. kInvalidArgument for text over the size
  // limit, kDoesNotFit if the pattern's match limit is reached.
  Result<std::vector<int32_t>> encode(std::string_view text, bool add_special_tokens) const;
  // Returns the special tokens that encode() finds in `text`, unique and ascending.
  std::vector<int32_t> find_special_tokens(std::string_view text) const;
  // Returns m if every text of n bytes has at least n / m tokens; 0 if some text produces no token.
  int64_t max_bytes_per_token() const;
  std::string decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const;
  // Appends the bytes that one id contributes, before decode() would convert them to text. The caller keeps
  // *is_first, initially true, between calls.
  void append_bytes(int32_t id, bool skip_special_tokens, bool* is_first, std::string* bytes) const;
  // Returns the bytes of one token; empty for an id without a token.
  std::string_view token_bytes(int32_t id) const;
  bool is_special(int32_t id) const;
  bool has_token(int32_t id) const;
  int64_t vocab_size() const;                          // all ids are below this; some may have no token
  int32_t find_token(std::string_view content) const;  // -1 if absent

 private:
  struct State;
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Incrementally turns ids into text: returns only whole UTF-8 characters (invalid bytes become U+FFFD). The
// concatenation of all pieces equals Tokenizer::decode of all ids.
class IncrementalDetokenizer {
 public:
  IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
      : tokenizer_(&tokenizer), skip_special_tokens_(skip_special_tokens) {}
  std::string push(int32_t id);  // the text that became complete, possibly empty
  std::string finish();          // the rest; an incomplete character becomes U+FFFD

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  bool is_first_ = true;  // no token so far
  std::string pending_;   // bytes of an incomplete character
};

}  // namespace fp4moe
