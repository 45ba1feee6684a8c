// What goes into the engine and what comes out of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// What the text of an answer must match: no token is sampled that cannot be part of such a text, and the
// answer ends (FinishReason::kStop) where the text is whole.
struct GrammarSpec {
  enum class Kind { kNone, kJsonSchema, kRegex, kEbnf, kStructuralTag };
  Kind kind = Kind::kNone;
  std::string text;  // JSON Schema; pattern; rules, from "root" on; xgrammar's structural tag, as JSON
  bool operator==(const GrammarSpec&) const = default;
};

// Added to the logit of one token.
struct LogitBias {
  int32_t token_id = 0;
  float bias = 0;  // -100 to 100
};

// How a token is chosen. On the f32 logits, in this order: frequency and presence penalty, repetition
// penalty, logit_bias; then temperature, top_k, top_p, min_p. Penalties count the answer's tokens, not the
// prompt's. Log-probabilities are the model's own, from before all of it.
struct SamplingParams {
  float temperature = 1.0f;             // 0: greedy; else in (0, 100]
  float top_p = 1.0f;                   // in (0, 1]
  int32_t top_k = -1;                   // -1: all tokens; else >= 1
  float min_p = 0;                      // 0 to 1: least probability, as a part of the likeliest token's
  float frequency_penalty = 0;          // -2 to 2: taken from a token's logit for each time it has come
  float presence_penalty = 0;           // -2 to 2: the same, once
  float repetition_penalty = 1;         // (0, 2]: divides the logit of a token that has come, or multiplies
                                        // it where it is below 0
  std::vector<LogitBias> logit_bias;    // each token at most once
  std::optional<uint64_t> seed;         // same seed, same prompt, same text, whatever else runs
  int64_t max_new_tokens = 128;         // >= 0; cut to what the context leaves
  int64_t min_new_tokens = 0;           // until then nothing ends the answer; at most max_new_tokens
  std::vector<std::string> stop;        // generation ends before the first of these
  std::vector<std::string> stop_regex;  // generation ends before what one of these (PCRE2) matches first
  std::vector<int32_t> stop_token_ids;  // besides the model's own end tokens
  bool ignore_eos = false;
  bool skip_special_tokens = true;
  bool no_stop_trim = false;  // keep the matched stop string or token in the text
  int32_t top_logprobs = -1;  // -1: none; n: the chosen token's and the n best (n <= 20)
  GrammarSpec grammar;
};

struct Request {
  std::string id;                  // empty: the engine names it
  std::vector<int32_t> input_ids;  // the prompt, at least one id
  SamplingParams sampling;
  // Whose request this is: requests of different clients wait for the same limited work (compilations of
  // grammars) in turn. Any text; empty is a client like any other.
  std::string client;
  double timeout_seconds = 0;  // from submission to the end; 0: none but the engine's own
  // Not -1: the log-probabilities of the prompt's tokens after this position are wanted too, with
  // sampling.top_logprobs (which is not -1 then).
  int64_t prompt_logprobs_from = -1;
  // Not -1: the experts that each token from this position on has gone to are wanted.
  int64_t routed_experts_from = -1;
  std::optional<int64_t> priority;  // with enable_priority_scheduling; those without one wait for the others
  // A decode engine: "host:port" of the prefill engine that computes the prompt. Empty: this engine does.
  std::string prefill_node;
};

struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0;  // natural log, of the unscaled distribution
  std::string bytes;  // the token's own bytes, not always valid UTF-8
};

struct PositionLogprobs {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  // best first
};

enum class FinishReason { kNone, kStop, kLength, kAbort, kError };

// One step's news of one request. `text` is always whole UTF-8 and never holds a part of a stop
// string; concatenated over all deltas it is the answer.
struct Delta {
  std::string text;
  std::vector<int32_t> token_ids;
  std::vector<PositionLogprobs> logprobs;         // one for each of token_ids, if asked for
  std::vector<PositionLogprobs> prompt_logprobs;  // if asked for; all of them come before the first token
  // If asked for, with the last delta of an answer: [prompt + answer - 1 - routed_experts_from, layers,
  // top_k], best first; zeros of layers without experts. The last token of an answer goes to none.
  std::shared_ptr<const std::vector<int32_t>> routed_experts;
  FinishReason finish_reason = FinishReason::kNone;  // other than kNone: the last delta
  std::string matched_stop;         // the stop string that ended it, or what an expression matched
  int32_t matched_stop_token = -1;  // the token id that ended it, if one did
  std::string error;                // with kError: what happened
  StatusCode error_code = StatusCode::kInternal;  // and what kind of error it is
  int64_t prompt_tokens = 0;                      // of the whole request
  int64_t cached_tokens = 0;                      // of these, the first ones, that an earlier request left
  int64_t completion_tokens = 0;                  // so far
};

// Called on the engine's thread, in order, the last time with finish_reason set. It must be quick
// and must not call back into the engine except Engine::cancel.
using DeltaCallback = std::function<void(const Delta&)>;

}  // namespace fp4moe
