// Tokenizer: tokenizer.json (byte-level BPE), identical in ids to Hugging Face tokenizers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

class Tokenizer {
 public:
  // `json` is tokenizer.json's content. kDataLoss (not JSON), kInvalidArgument (malformed; names the key),
  // kUnsupported (a model, normalizer, pre-tokenizer or decoder that would change ids or text and is not
  // implemented; named).
  static Result<Tokenizer> parse(std::string_view json);
  // From a file, or from a folder's tokenizer.json.
  static Result<Tokenizer> load(const std::string& path);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Any bytes are accepted (invalid UTF-8 as U+FFFD, as a lossy decode would). Special tokens in the text
  // are recognised. add_special_tokens runs the post-processor's template. Errors: kInvalidArgument for text
  // over the size limit, kDoesNotFit where the pattern's match limit is reached.
  Result<std::vector<int32_t>> encode(std::string_view text, bool add_special_tokens) const;
  // The special tokens that encode() finds in `text`, each once, ascending.
  std::vector<int32_t> find_special_tokens(std::string_view text) const;
  // No text of n bytes has fewer than n / this tokens. 0: there is no such number, as some text has no token
  // at all.
  int64_t max_bytes_per_token() const;
  std::string decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const;
  // Appends what one id adds to the bytes that decode makes into text; *is_first starts as true and is kept
  // from call to call.
  void append_bytes(int32_t id, bool skip_special_tokens, bool* is_first, std::string* bytes) const;
  // The bytes of one token; empty for an id without one.
  std::string_view token_bytes(int32_t id) const;
  bool is_special(int32_t id) const;
  bool has_token(int32_t id) const;
  int64_t vocab_size() const;                          // ids are below this; some may have no token
  int32_t find_token(std::string_view content) const;  // -1 if there is none

 private:
  struct State;
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Turns ids into text as they come: gives only whole UTF-8 characters (invalid bytes as U+FFFD), and the
// concatenation of all pieces equals Tokenizer::decode of all ids.
class IncrementalDetokenizer {
 public:
  IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
      : tokenizer_(&tokenizer), skip_special_tokens_(skip_special_tokens) {}
  std::string push(int32_t id);  // the text that became certain, maybe empty
  std::string finish();          // what is left, incomplete characters as U+FFFD

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  bool is_first_ = true;  // no token so far
  std::string pending_;   // bytes of an incomplete character
};

}  // namespace fp4moe
