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

// What one call into a grammar backend may use before it fails. Steps count work (automaton states and edges,
// parser states, tokens tried), never time: the same call with the same budget ends the same way on every
// machine.
struct GrammarBudget {
  int64_t max_steps = 0;
  int64_t max_bytes = 0;                            // allocated by a compilation, or held by a matcher
  const std::atomic<bool>* is_cancelled = nullptr;  // null: the call cannot be cancelled
};
// A step takes 2 to 9 ns of one core, so these are at most 28 s, 180 ms and 180 ms, and typically a third of
// that. Strings of up to 1000 characters with a vocabulary of 200 000 tokens take two thirds of a
// compilation's steps.
inline constexpr GrammarBudget kCompileBudget{.max_steps = 3'000'000'000, .max_bytes = 256 << 20};
inline constexpr GrammarBudget kMaskBudget{.max_steps = 20'000'000, .max_bytes = 128 << 20};
inline constexpr GrammarBudget kAcceptBudget{.max_steps = 20'000'000, .max_bytes = 128 << 20};

// The state of one output in a grammar. Used by one thread at a time. After fill_allowed() or accept() has
// failed, the matcher may only be destroyed; other matchers of its grammar are not affected.
class GrammarMatcher {
 public:
  virtual ~GrammarMatcher() = default;
  // The ids that may come next: bit id % 32 of word id / 32, [ceil(V / 32)]; bits from V on are undefined.
  // End tokens are allowed where the text is complete; ids without a token, and special tokens that the
  // grammar does not name, never are. kInvalidArgument: over the budget's steps or bytes; kCancelled:
  // is_cancelled was set.
  virtual Status fill_allowed(std::span<uint32_t> allowed, const GrammarBudget& budget) = 0;
  // Consumes the next token. kInternal if it was not allowed; kInvalidArgument and kCancelled as
  // fill_allowed().
  virtual Status accept(int32_t id, const GrammarBudget& budget) = 0;
  // Whether the text is complete and nothing can follow: after an end token or, if the model has none, as
  // soon as the text is complete.
  virtual bool has_ended() const = 0;
  // Total steps of all calls.
  virtual int64_t num_steps() const = 0;
};

// Immutable and thread-safe.
class Grammar {
 public:
  virtual ~Grammar() = default;
  virtual std::unique_ptr<GrammarMatcher> make_matcher() const = 0;
  virtual int64_t num_bytes() const = 0;
  // Steps that its compilation took.
  virtual int64_t num_steps() const = 0;
};

class GrammarCompiler {
 public:
  virtual ~GrammarCompiler() = default;
  // Callable from any thread; runs on the caller's thread only and may take seconds. kInvalidArgument: the
  // grammar is malformed, no text matches it, a part of it would have to be ignored, or it is over the budget
  // (the message names the part); kCancelled: is_cancelled was set.
  virtual Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec,
                                                         const GrammarBudget& budget) = 0;
};

// Whether this build includes xgrammar.
bool has_grammar_backend();

// The tokenizer is borrowed until the first compile() has returned. Grammars for JSON allow no white space
// between its parts. Returns null in a build without xgrammar.
std::unique_ptr<GrammarCompiler> make_grammar_compiler(const Tokenizer& tokenizer, int64_t vocab_size,
                                                       std::vector<int32_t> eos_token_ids);

}  // namespace fp4moe
