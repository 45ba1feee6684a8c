// Request: the engine's input; Delta: its output.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// A grammar that the output text must match: tokens that cannot continue a match are never sampled, and the
// output ends (FinishReason::kStop) when the match is complete.
struct GrammarSpec {
  enum class Kind { kNone, kJsonSchema, kRegex, kEbnf, kStructuralTag };
  // A key beside "json_schema" in a structural tag: where the schema is in the client's request. The paths in
  // its errors begin with this text instead of the schema's place in the tag.
  static constexpr const char* kSchemaPlace = "schema_place";
  Kind kind = Kind::kNone;
  // By kind: a JSON Schema; a pattern; EBNF rules with start rule "root"; xgrammar's structural tag as JSON
  std::string text;
  bool operator==(const GrammarSpec&) const = default;
};

// A value added to the logit of one token.
struct LogitBias {
  int32_t token_id = 0;
  float bias = 0;  // -100 to 100
};

// How a token is sampled. The f32 logits are changed in this order: frequency and presence penalty,
// repetition penalty, logit_bias; then temperature, top_k, top_p, min_p. Penalties count output tokens only,
// not prompt tokens. Log-probabilities are computed from the logits before all of these changes.
struct SamplingParams {
  static constexpr int32_t kMaxLogprobIds = 128;

  float temperature = 1.0f;           // 0: greedy; else in (0, 100]
  float top_p = 1.0f;                 // in (0, 1]
  int32_t top_k = -1;                 // -1: all tokens; else >= 1
  float min_p = 0;                    // 0 to 1: minimum probability, relative to the likeliest token's
  float frequency_penalty = 0;        // -2 to 2: subtracted from a token's logit for each earlier occurrence
  float presence_penalty = 0;         // -2 to 2: subtracted once if the token has occurred
  float repetition_penalty = 1;       // (0, 2]: divides positive logits of tokens that have occurred and
                                      // multiplies negative ones
  std::vector<LogitBias> logit_bias;  // at most 1024, each token at most once
  // The same seed and prompt give the same text, whatever the other requests; unset: from config.random_seed.
  std::optional<uint64_t> seed;
  int64_t max_new_tokens = 128;  // >= 0; capped by the remaining context
  int64_t min_new_tokens = 0;    // the output does not end earlier; 0 to max_new_tokens; 0 with a grammar
  // At most 64, 1 to 1024 bytes each: generation ends before the first one that occurs.
  std::vector<std::string> stop;
  // At most 16 PCRE2 patterns, 1 to 1024 bytes each: generation ends before the first match.
  std::vector<std::string> stop_regex;
  std::vector<int32_t> stop_token_ids;  // at most 64, in addition to the model's EOS tokens
  bool ignore_eos = false;          // the model's EOS tokens do not end the output; no effect with a grammar
  bool skip_special_tokens = true;  // leave special tokens out of the text
  bool no_stop_trim = false;        // keep the matched stop string or token in the text
  int32_t top_logprobs = -1;        // -1: none; n: the chosen token's and the n best (n <= 20)
  // Ids whose log-probabilities are returned too, in this order; at most kMaxLogprobIds, and at most 2^21
  // log-probabilities in a prompt. Requires top_logprobs >= 0.
  std::vector<int32_t> token_ids_logprob;
  GrammarSpec grammar;
};

struct Request {
  std::string id;                  // unique among active requests; empty: the engine generates one
  std::vector<int32_t> input_ids;  // the prompt, at least one id
  SamplingParams sampling;
  // Fairness key: clients take turns at limited work (grammar compilation). Any text; may be empty.
  std::string client;
  double timeout_seconds = 0;  // from submission to the end; 0: only the engine's own limits apply
  // Return log-probabilities of the prompt tokens after this position, with sampling.top_logprobs (which must
  // then be >= 0); -1: none.
  int64_t prompt_logprobs_from = -1;
  // Return the experts to which each token from this position on was routed; -1: none.
  int64_t routed_experts_from = -1;
  // Used with enable_priority_scheduling; unset: scheduled after all requests with a priority.
  std::optional<int64_t> priority;
  // Decode engine: "host:port" of the prefill engine that computes the prompt; empty: this engine does.
  std::string prefill_node;
};

struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0;  // natural log, at temperature 1
  std::string bytes;  // the token's bytes, not always valid UTF-8
};

struct PositionLogprobs {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  // best first
  std::vector<TokenLogprob> ids;  // of SamplingParams::token_ids_logprob
};

enum class FinishReason { kNone, kStop, kLength, kAbort, kError };

// New output of one request in one step. `text` is always complete UTF-8 and never ends within a possible
// stop string; the concatenation over all deltas is the output text.
struct Delta {
  std::string text;
  std::vector<int32_t> token_ids;  // new output tokens
  // If requested: one per element of token_ids. With token_ids_logprob and max_new_tokens = 0, the last delta
  // has one for the token after the prompt; its chosen.token_id is -1, because no token is chosen.
  std::vector<PositionLogprobs> logprobs;
  std::vector<PositionLogprobs> prompt_logprobs;  // if requested; all precede the first output token
  // If requested, in the last delta: [prompt + output - 1 - routed_experts_from, layers, top_k], best expert
  // first, zeros in layers without experts. The last output token is not routed. Null if incomplete.
  std::shared_ptr<const std::vector<int32_t>> routed_experts;
  FinishReason finish_reason = FinishReason::kNone;  // not kNone: this is the last delta
  std::string matched_stop;         // the stop string or stop_regex that ended the output; empty: none
  int32_t matched_stop_token = -1;  // the token id that ended the output; -1: none
  std::string error;                // with kError: the message
  StatusCode error_code = StatusCode::kInternal;  // with kError
  int64_t prompt_tokens = 0;                      // of the whole prompt
  int64_t cached_tokens = 0;                      // leading prompt tokens served from cached KV pages
  int64_t completion_tokens = 0;                  // output tokens so far
  // Speculative decoding: decode steps so far, draft tokens computed in them, and those that were kept.
  int64_t spec_verify_ct = 0, spec_num_proposed_drafts = 0, spec_num_correct_drafts = 0;
  // In the last delta: [n] is the number of steps in which exactly n drafts were kept. Empty if none ran.
  std::vector<int64_t> spec_correct_drafts_histogram;
};

// Receives a request's deltas in order, normally on the engine's thread (on the watchdog's thread if a stuck
// engine fails); the last delta has finish_reason set. Must be quick, and may call only Engine::cancel. If
// it throws, its request ends with kError.
using DeltaCallback = std::function<void(const Delta&)>;

}  // namespace fp4moe
