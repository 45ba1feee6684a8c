// Engine: one loaded model that answers many requests at once. All methods may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct EngineConfig;  // fp4moe/config.h

// Facts of the loaded model, constant after Engine::make.
struct ModelInfo {
  std::string name;  // served model name
  std::string path;
  std::string architecture;  // such as "GptOssForCausalLM"
  std::string quantization;  // such as "mxfp4"
  std::string backend;       // what runs the experts, such as "cpu_avx512"
  int64_t vocab_size = 0;    // V of the logits
  int64_t num_layers = 0, hidden_size = 0, num_experts = 0, top_k = 0;
  int64_t context_length = 0;  // most tokens of prompt and answer together
  // No text of n bytes has fewer than n / this tokens; 0: unknown, as the tokenizer may drop text.
  int64_t max_bytes_per_token = 0;
  int64_t max_total_tokens = 0;  // KV pool
  int64_t weight_bytes = 0, kv_bytes = 0;
  std::vector<int32_t> eos_token_ids;
  std::string chat_template;               // its source; empty if there is none
  bool has_grammars = false;               // SamplingParams::grammar may be given
  std::string disaggregation_mode;         // as in EngineConfig
  int disaggregation_bootstrap_port = 0;   // a prefill engine's
  SamplingParams default_sampling;         // from generation_config.json where it says
  std::vector<std::string> startup_lines;  // device, plan, memory: the start-up screen
};

// Counters and gauges at one moment.
struct EngineStats {
  int64_t num_running_reqs = 0, num_queue_reqs = 0;
  int64_t num_grammar_queue_reqs = 0;  // of both, those that wait for their grammar or for its next mask
  int64_t num_used_tokens = 0, max_total_num_tokens = 0;
  // KV pages; each is used by requests, cached (kept for requests that begin like a past one) or free.
  int64_t num_used_pages = 0, num_cached_pages = 0, num_free_pages = 0, num_pages = 0;
  int64_t num_leaked_pages = 0;  // not 0: the books of these pages are wrong
  // Disaggregation. Requests of a prefill engine whose pages wait to be taken; of a decode engine, that wait
  // for a prefill engine's first token, and for its pages.
  int64_t num_held_reqs = 0, num_awaited_reqs = 0, num_transferring_reqs = 0;
  int64_t kv_transfer_bytes_total = 0;  // of pages, sent or received
  int64_t num_prompts_total = 0;        // computed to their first token, and their tokens:
  int64_t prompt_tokens_total = 0, generation_tokens_total = 0;
  int64_t cached_tokens_total = 0;  // of the prompts, found in KV pages of earlier requests
  double cache_hit_rate = 0;        // their part of the prompts that came last
  // Ended requests: all of them, and of these the aborted and the failed ones.
  int64_t num_requests_total = 0, num_aborted_requests_total = 0, num_failed_requests_total = 0;
  int64_t num_timed_out_requests_total = 0;  // failed by a time limit
  double new_token_ratio = 0;                // part of the answers to come that admission keeps room for
  int64_t num_retracted_reqs = 0;            // times a request gave its KV pages up and started again, in all
  double gen_throughput = 0;                 // tokens/s over the last seconds
  double load_seconds = 0, uptime_seconds = 0;
};

// Where the routers sent tokens, since Engine::make. A token counts once in each layer for each of its top_k
// experts; the last layer sees only the rows whose logits are wanted.
struct ExpertLoad {
  std::string failure;          // why the counts could not be read, or empty: a GPU's
  std::vector<int64_t> layers;  // those with a router, ascending
  int64_t num_experts = 0;      // E
  std::vector<int64_t> tokens;  // [layers, E]
  int counted_ranks = 0;        // whose tokens these are: the ranks of this process,
  int num_ranks = 1;            // of so many
};

struct ChatTemplateOptions {
  bool add_generation_prompt = true;
  bool continue_final_message = false;
  std::string tools_json;   // JSON array, or empty
  std::string kwargs_json;  // JSON object of further template variables, or empty
};

class Engine {
 public:
  // Loads the model and starts the engine's thread. Refuses unknown combinations before any weight
  // is read: kInvalidArgument, kUnsupported, kDoesNotFit, kDataLoss, kNotFound.
  static Result<std::unique_ptr<Engine>> make(EngineConfig config);
  // Ranks in several processes (mpirun, srun): process 0 makes the engine, the others follow it with the same
  // flags: they hold their ranks and take part in its steps until it is destroyed (OK) or fails.
  static bool is_follower(const EngineConfig& config);
  static Status follow(EngineConfig config);

  virtual ~Engine() = default;  // aborts what runs

  // Queues a request; returns its id at once. kInvalidArgument (ids out of range, bad parameters),
  // kDoesNotFit (longer than the context or the KV pool), kUnavailable (queue full, draining, failed).
  virtual Result<std::string> submit(Request request, DeltaCallback on_delta) = 0;
  // Ends a request; its last delta has kAbort. Unknown and finished ids are ignored.
  virtual void cancel(const std::string& id) = 0;
  // Forgets the KV pages of past requests. kUnavailable, and nothing is done, while any request runs or
  // waits.
  virtual Status flush_cache() = 0;
  // Refuses new requests; returns when none runs, or after the deadline with the rest aborted.
  virtual void drain(double timeout_seconds) = 0;

  // Not OK once a rank has failed or did not come in time: all requests have ended with this error, new ones
  // are refused, and only a new engine helps.
  virtual Status failure() const { return {}; }
  // After a failure: ends the other processes at once, and maybe this one, without waiting for any.
  virtual void abort() {}

  virtual const ModelInfo& info() const = 0;
  virtual EngineStats stats() const = 0;
  virtual ExpertLoad expert_load() const = 0;

  // Text to ids and back. add_special_tokens runs the tokenizer's post-processor.
  virtual Result<std::vector<int32_t>> tokenize(std::string_view text, bool add_special_tokens) const = 0;
  virtual Result<std::string> detokenize(const std::vector<int32_t>& ids, bool skip_special_tokens) const = 0;
  // The special tokens that tokenize() would find in `text`, each once, ascending; far cheaper than that.
  virtual std::vector<int32_t> find_special_tokens(std::string_view text) const = 0;
  // The bytes one id stands for; empty for ids without a token.
  virtual std::string token_bytes(int32_t id) const = 0;
  // Renders the chat template over a JSON array of messages. kUnsupported if the model has none,
  // kInvalidArgument with the template's line for an error inside it.
  virtual Result<std::string> apply_chat_template(std::string_view messages_json,
                                                  const ChatTemplateOptions& options) const = 0;
};

}  // namespace fp4moe
