// Grammars that the text of an output must match, compiled for one tokenizer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fp4moe/request.h"
#include "fp4moe/status.h"
#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

// Limits of one call into a grammar backend; a call that exceeds one fails. Steps count work (automaton
// states and edges, parser states, tokens tried), never time: the same call with the same budget ends the
// same way on every machine.
struct GrammarBudget {
  int64_t max_steps = 0;
  int64_t max_bytes = 0;                            // allocated by a compilation, or held by a matcher
  const std::atomic<bool>* is_cancelled = nullptr;  // null: the call cannot be cancelled
};
// A step takes 2 to 9 ns on one core, so the budgets allow at most 28 s, 180 ms and 180 ms, and typically a
// third of that. A schema with strings of up to 1000 characters, with a vocabulary of 200 000 tokens, takes
// two thirds of a compilation's steps.
inline constexpr GrammarBudget kCompileBudget{.max_steps = 3'000'000'000, .max_bytes = 256 << 20};
inline constexpr GrammarBudget kMaskBudget{.max_steps = 20'000'000, .max_bytes = 128 << 20};
inline constexpr GrammarBudget kAcceptBudget{.max_steps = 20'000'000, .max_bytes = 128 << 20};

// The state of one output in a grammar. Not thread-safe. After fill_allowed() or accept() has failed, the
// matcher can only be destroyed; other matchers of its grammar are not affected.
class GrammarMatcher {
 public:
  virtual ~GrammarMatcher() = default;
  // Sets the bits of the ids that can come next: bit id % 32 of word id / 32, [ceil(V / 32)]; bits from V on
  // are undefined. End tokens are allowed where the text is complete. Ids without a token are never allowed,
  // and special tokens only if the grammar names them. kInvalidArgument: the steps or bytes exceed the
  // budget; kCancelled: is_cancelled was set.
  virtual Status fill_allowed(std::span<uint32_t> allowed, const GrammarBudget& budget) = 0;
  // Consumes the next token. kInternal if it was not allowed; kInvalidArgument and kCancelled as for
  // fill_allowed().
  virtual Status accept(int32_t id, const GrammarBudget& budget) = 0;
  // Undoes the last num_tokens calls of accept(), which have succeeded.
  virtual void rollback(int64_t num_tokens) = 0;
  // Whether the text is complete and nothing can follow: after an end token or, if the model has none, as
  // soon as the text is complete.
  virtual bool has_ended() const = 0;
  // Total steps of all calls.
  virtual int64_t num_steps() const = 0;
};

// Returns whether a mask that fill_allowed() has filled has the bit of `id`.
inline bool is_allowed(std::span<const uint32_t> allowed, int32_t id) {
  const auto i = static_cast<size_t>(id);
  return (allowed[i / 32] >> (i % 32) & 1) != 0;
}

// Immutable and thread-safe.
class Grammar {
 public:
  virtual ~Grammar() = default;
  virtual std::unique_ptr<GrammarMatcher> make_matcher() const = 0;
  virtual int64_t num_bytes() const = 0;
  // Steps that the compilation took.
  virtual int64_t num_steps() const = 0;
};

class GrammarCompiler {
 public:
  virtual ~GrammarCompiler() = default;
  // Callable from any thread; runs only on the caller's thread and can take seconds. kInvalidArgument: the
  // grammar is malformed, no text matches it, a part of it would have to be ignored, or it exceeds the budget
  // (the message names the part); kCancelled: is_cancelled was set.
  virtual Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec,
                                                         const GrammarBudget& budget) = 0;
};

// Whether this build includes xgrammar.
bool has_grammar_backend();

// The tokenizer is borrowed until the first compile() has returned. JSON grammars allow no white space
// outside strings. Returns null in a build without xgrammar.
std::unique_ptr<GrammarCompiler> make_grammar_compiler(const Tokenizer& tokenizer, int64_t vocab_size,
                                                       std::vector<int32_t> eos_token_ids);

}  // namespace fp4moe
