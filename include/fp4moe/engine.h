// Engine: one loaded model that serves many requests at once. All methods may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/expert_moves.h"
#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct EngineConfig;  // fp4moe/config.h

// Facts about the loaded model, constant after Engine::make.
// Large because each fact that the server reports is a field.
struct ModelInfo {
  std::string name;                  // served model name, in responses
  std::vector<std::string> aliases;  // further names that requests may use
  std::string path;                  // EngineConfig::model_path; see Engine::weight_source()
  std::string tokenizer_path;        // EngineConfig::tokenizer_path, or else model_path
  std::string architecture;          // such as "GptOssForCausalLM"
  std::string quantization;          // such as "mxfp4"
  std::string backend;               // runner for the experts, such as "cpu_avx512"
  int64_t vocab_size = 0;            // V, the width of the logits
  int64_t num_layers = 0, hidden_size = 0, num_experts = 0, top_k = 0;
  int64_t context_length = 0;        // maximum tokens in prompt and output together
  int64_t max_running_requests = 0;  // maximum in one batch
  int64_t max_prefill_tokens = 0;    // maximum prompt tokens in one step
  // A text of n bytes has at least n / max_bytes_per_token tokens; 0: unknown (the tokenizer may drop text).
  int64_t max_bytes_per_token = 0;
  int64_t page_size = 0;                   // tokens per KV page; prefixes are cached in whole pages
  int64_t max_total_tokens = 0;            // capacity of the KV pools of all data-parallel groups
  int64_t weight_bytes = 0, kv_bytes = 0;  // for this process's ranks
  std::vector<int32_t> eos_token_ids;
  std::string chat_template;               // Jinja source; empty: the model has none
  bool moves_experts = false;              // EngineConfig::enable_eplb: rebalance_experts() is supported
  bool has_grammars = false;               // requests may set SamplingParams::grammar
  std::string speculative_algorithm;       // empty: no speculative decoding
  std::string disaggregation_mode;         // as in EngineConfig
  int disaggregation_bootstrap_port = 0;   // prefill engine: its listening port; otherwise 0
  SamplingParams default_sampling;         // from generation_config.json, if present there
  std::vector<std::string> startup_lines;  // device, plan and memory, as logged at startup
};

// Snapshot of counters (*_total, since Engine::make) and gauges.
// Large because each metric is a field.
struct EngineStats {
  int64_t num_running_reqs = 0, num_queue_reqs = 0;
  int64_t num_grammar_queue_reqs = 0;  // running and queued requests waiting for a grammar or its mask
  // Capacity, in tokens, of the KV pages in use, and of all KV pages.
  int64_t num_used_tokens = 0, max_total_num_tokens = 0;
  // KV pages; each is used by a request, cached (its prefix may be reused) or free.
  int64_t num_used_pages = 0, num_cached_pages = 0, num_free_pages = 0, num_pages = 0;
  // The same for the pages of window layers; 0 if the model has none or they share the pages above.
  int64_t num_used_window_pages = 0, num_cached_window_pages = 0, num_free_window_pages = 0;
  int64_t num_window_pages = 0;
  // Slots for states of sequences (models with recurrent layers), used by running requests, and snapshots
  // that the prefix cache keeps; of num_state_slots in all.
  int64_t num_used_state_slots = 0, num_state_snapshots = 0, num_state_slots = 0;
  int64_t num_leaked_pages = 0;  // not 0: the page accounting is inconsistent (a bug)
  // Disaggregation. Prefill engine: requests whose pages are held until fetched. Decode engine: requests
  // waiting for the prefill engine's first token, and requests waiting for its pages.
  int64_t num_held_reqs = 0, num_awaited_reqs = 0, num_transferring_reqs = 0;
  int64_t kv_transfer_bytes_total = 0;  // bytes of KV pages and states sent (prefill) or received (decode)
  // Seconds from the request for a prompt's pages to the last of them or of its state, summed over prompts,
  // without the time in which the prefill engine had yet to compute any of those left (prefill), or which
  // passed before the first token (decode); and seconds of copies between the connection's buffers and the KV
  // pages and states.
  double kv_transfer_seconds_total = 0, kv_transfer_copy_seconds_total = 0;
  int64_t num_prompts_total = 0;  // prompts prefilled
  // Tokens in these prompts, including cached ones; output tokens.
  int64_t prompt_tokens_total = 0, generation_tokens_total = 0;
  int64_t cached_tokens_total = 0;  // prompt tokens served from cached KV pages
  double cache_hit_rate = 0;        // cached fraction of the most recently prefilled prompt tokens
  // Ended requests: all, those that ended with kAbort, those that ended with kError.
  int64_t num_requests_total = 0, num_aborted_requests_total = 0, num_failed_requests_total = 0;
  int64_t num_timed_out_requests_total = 0;  // failed because of a time limit
  double new_token_ratio = 0;                // fraction of outstanding output tokens with reserved pages
  int64_t num_retracted_reqs = 0;  // total retractions: running requests requeued without their pages
  // Speculative decoding: decode rows of all requests and steps, drafts computed with them, drafts kept.
  int64_t spec_verify_calls_total = 0, spec_proposed_drafts_total = 0, spec_correct_drafts_total = 0;
  // The drafts computed and kept by their position in the step. Empty without speculative decoding.
  std::vector<int64_t> spec_proposed_by_position, spec_correct_by_position;
  // Mean tokens per request and decode step, since startup: its correct drafts and one more; 0: no step yet.
  double spec_accept_length() const {
    const auto verified = static_cast<double>(spec_verify_calls_total);
    return verified == 0 ? 0 : 1 + static_cast<double>(spec_correct_drafts_total) / verified;
  }
  ExpertMoveTotals expert_moves;
  bool is_updating_weights = false;  // Engine::update_weights() is loading: no request makes progress
  double gen_throughput = 0;         // output tokens/s over the last 5 s
  double load_seconds = 0, uptime_seconds = 0;
};

// The number of tokens that the routers have sent to each expert since Engine::make. A token counts once in
// each layer for each of its top_k experts; the last layer computes only rows whose logits are needed.
struct ExpertLoad {
  std::string failure;          // why the GPU's counters could not be read; empty: no error
  std::vector<int64_t> layers;  // layers with a router, ascending
  int64_t num_experts = 0;      // E
  std::vector<int64_t> tokens;  // [layers, E], row-major
  int counted_ranks = 0;        // ranks whose tokens are counted: those of this process
  int num_ranks = 1;            // ranks of the whole job
};

// Where the weights come from.
struct WeightSource {
  std::string model_path;
  std::string version = "default";  // any text, chosen by the client that updated the weights
};

struct ChatTemplateOptions {
  bool add_generation_prompt = true;    // end with the header of the assistant's message
  bool continue_final_message = false;  // leave the last message open, for the model to continue
  std::string tools_json;               // JSON array; empty: no tools
  std::string kwargs_json;              // JSON object of further template variables; empty: none
};

class Engine {
 public:
  // Loads the model and starts the engine's thread. Unsupported combinations are refused before any weight
  // is read. Errors: kInvalidArgument, kUnsupported, kDoesNotFit, kDataLoss, kNotFound.
  static Result<std::unique_ptr<Engine>> make(EngineConfig config);
  // Ranks in several processes (mpirun, srun): process 0 calls make(), and every other process
  // (is_follower()) calls follow() with the same flags. follow() loads the process's ranks and runs them in
  // each step; it returns OK when the engine is destroyed, or the error if the job fails.
  static bool is_follower(const EngineConfig& config);
  static Status follow(EngineConfig config);

  virtual ~Engine() = default;  // aborts all requests

  // Queues a request and returns its id at once. kInvalidArgument (ids out of range, bad parameters),
  // kDoesNotFit (longer than the context), kUnsupported (the request needs a feature that is off or missing),
  // kUnavailable (queue full, draining, failed).
  virtual Result<std::string> submit(Request request, DeltaCallback on_delta) = 0;
  // Ends a request; its last delta has kAbort. Unknown and finished ids are ignored.
  virtual void cancel(const std::string& id) = 0;
  // Frees the cached KV pages. kUnavailable, without any effect, while a request is running or queued.
  virtual Status flush_cache() = 0;
  // Replaces the weights by those of the checkpoint in source.model_path, which must have the same
  // config.json and tensors of the same names, types and shapes; its tokenizer, chat template and
  // generation_config.json are not read. Requests submitted before run to their end first (`aborts`: end with
  // kAbort), and later ones wait, so each output comes from one checkpoint. Frees the cached KV pages.
  // Returns the number of requests that waited. An error while failure() is OK: the checkpoint, or the
  // engine's configuration, does not allow it (kUnavailable: another update has not ended, or the engine
  // drains), and the old weights serve on.
  virtual Result<int64_t> update_weights(const WeightSource& source, bool aborts) = 0;
  // Returns the source of the last update, or of the weights loaded at start. Thread-safe, as all methods.
  virtual WeightSource weight_source() const = 0;
  // Refuses new requests and waits for the running ones; those still running at the deadline are aborted.
  virtual void drain(double timeout_seconds) = 0;

  // Not OK once the engine has failed for good (a rank failed or timed out, a device error, a stuck step):
  // all requests have ended with an error, new ones are refused, and the engine must be replaced.
  virtual Status failure() const { return {}; }
  // After a failure: ends the other processes at once, and maybe this one, without waiting for them.
  virtual void abort() {}

  virtual const ModelInfo& info() const = 0;
  virtual EngineStats stats() const = 0;
  virtual ExpertLoad expert_load() const = 0;
  // Moves experts between the ranks by the loads since the last call, between two steps. kUnsupported without
  // EngineConfig::enable_eplb. Other errors are those of failure().
  virtual Result<ExpertMoves> rebalance_experts() {
    return unsupported("the engine does not move experts between ranks");
  }

  // Convert text to ids and back. add_special_tokens runs the tokenizer's post-processor. detokenize:
  // kInvalidArgument for an id outside 0 to vocab_size - 1.
  virtual Result<std::vector<int32_t>> tokenize(std::string_view text, bool add_special_tokens) const = 0;
  virtual Result<std::string> detokenize(const std::vector<int32_t>& ids, bool skip_special_tokens) const = 0;
  // Returns the distinct ids, ascending, of the special tokens in `text`; much cheaper than tokenize().
  virtual std::vector<int32_t> find_special_tokens(std::string_view text) const = 0;
  // Returns the bytes of one token; empty for an id without a token.
  virtual std::string token_bytes(int32_t id) const = 0;
  // Renders the chat template over a JSON array of messages. kUnsupported if the model has no
  // template; kInvalidArgument, with the line number, for an error in the template.
  virtual Result<std::string> apply_chat_template(std::string_view messages_json,
                                                  const ChatTemplateOptions& options) const = 0;
};

}  // namespace fp4moe
