// Grammars that the text of an answer must match, compiled for one tokenizer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fp4moe/request.h"
#include "fp4moe/status.h"
#include "io/tokenizer.h"

namespace fp4moe {

// One answer's way through a grammar. For one thread at a time.
class GrammarMatcher {
 public:
  virtual ~GrammarMatcher() = default;
  // The ids that may come next: bit id % 32 of word id / 32, [ceil(V / 32)]; bits from V on mean
  // nothing. End tokens are among them where
  // the text is whole; ids without a token and special tokens that the grammar does not name never are.
  virtual Status fill_allowed(std::span<uint32_t> allowed) = 0;
  // Takes the next token. kInternal if it was not allowed.
  virtual Status accept(int32_t id) = 0;
  // Whether the text is whole and nothing can follow: after an end token or, where the model has none, as
  // soon as the text is whole.
  virtual bool has_ended() const = 0;
};

// Immutable, for any thread.
class Grammar {
 public:
  virtual ~Grammar() = default;
  virtual std::unique_ptr<GrammarMatcher> make_matcher() const = 0;
  virtual int64_t num_bytes() const = 0;
};

class GrammarCompiler {
 public:
  virtual ~GrammarCompiler() = default;
  // From any thread. May take seconds. kInvalidArgument: malformed, no text can match it, or a part of it
  // would have to be ignored (which is named).
  virtual Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec) = 0;
};

// Whether this is a build with xgrammar.
bool has_grammar_backend();

// The tokenizer is borrowed until the first compile() has returned. JSON is written without white space
// between its parts. Null in a build without xgrammar.
std::unique_ptr<GrammarCompiler> make_grammar_compiler(const Tokenizer& tokenizer, int64_t vocab_size,
                                                       std::vector<int32_t> eos_token_ids);

}  // namespace fp4moe
