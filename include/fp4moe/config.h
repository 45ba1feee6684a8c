// EngineConfig: everything that decides how a model is loaded and run. Fields are named after the
// command-line flags (SGLang's names) with '_' instead of '-'.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/sinks.h"

namespace fp4moe {

struct NamedValue {
  std::string name, value;
};

// Large because each engine flag is a field.
struct EngineConfig {
  // Model.
  std::string model_path;  // folder with config.json and safetensors
  // auto (= safetensors) | safetensors | dummy (random weights in config.json's shapes; needs no other file)
  std::string load_format = "auto";
  std::string weight_version = "default";  // names the weights until an update; see WeightSource
  bool allow_unused_tensors = false;       // false: a model tensor that is not read is an error
  std::string tokenizer_path;              // folder, tokenizer.json or tiktoken.model; empty: model_path
  std::string chat_template;               // path of a Jinja template; empty: the checkpoint's template
  // Names that requests may use, the first in responses; empty: the last component of model_path
  std::vector<std::string> served_model_name;
  // auto | mxfp4 | modelopt_fp4 | compressed-tensors | quark | fp8; must match the checkpoint
  std::string quantization = "auto";
  std::string kv_cache_dtype = "auto";  // auto (= dtype's) | bfloat16 (the same) | fp8_e4m3 (8 bits)
  std::string dtype = "auto";           // activations: auto (= bfloat16) | bfloat16 | float32
  std::string dense_quant = "none";     // weights of dense layers: none (= bf16) | q8 (CPU only) | fp8
  // CPU: folder of the packed-weight cache; empty: in the user's cache folder; "none": no cache
  std::string weight_cache_dir;
  // Structured output: auto (xgrammar if the build has it) | xgrammar | none
  std::string grammar_backend = "auto";
  double grammar_compile_timeout = 60;  // seconds for one compilation
  // Work budget of a grammar per token, in steps (2 to 9 ns each). A request fails if its grammar exceeds
  // this budget or grammar_max_bytes.
  int64_t grammar_max_steps = 20'000'000;
  int64_t grammar_max_bytes = 64 << 20;     // limit in bytes for one compiled grammar
  int64_t grammar_cache_bytes = 128 << 20;  // limit in bytes for all cached grammars; LRU eviction
  int64_t context_length = 0;  // tokens; 0: max_position_embeddings, or less if the KV pool is smaller

  // Device and backends.
  std::string device = "auto";              // auto | cpu | cuda
  int threads = 0;                          // CPU threads; 0: all cores this process may use
  std::string moe_runner_backend = "auto";  // auto, a runner's name or SGLang's (docs/backends.md)
  std::string moe_a2a_backend = "none";     // none | deepep | flashinfer
  std::string fp4_compute = "auto";         // auto (implied by the runner) | w4a16 | w4a4 | w4a8
  std::string fp4_act_scales = "auto";      // w4a4: auto | static (the checkpoint's) | per_token
  std::string deepep_mode = "auto";         // auto | low_latency (normal is refused)
  std::string deepep_dispatcher_output_dtype = "auto";      // auto | bf16 | fp8 | nvfp4
  std::string flashinfer_dispatcher_output_dtype = "auto";  // auto | bf16 | nvfp4
  std::string flashinfer_combine_dtype = "auto";            // auto (= bf16) | bf16 | fp8
  bool disable_fp4_allgather = false;  // DP attention with a2a none: gather unquantised rows
  // The same bits on any number of ranks; on GPUs they do not depend on the batch either. Slower.
  bool enable_deterministic_inference = false;

  // Ranks.
  std::string fabric = "auto";  // auto | local | threads | mpi
  int tp_size = 1;              // total number of ranks
  int ep_size = 1;              // 1: each expert is sharded along I; tp_size: each rank has whole experts
  int dp_size = 1;              // data-parallel groups; each has tp_size / dp_size ranks and its own requests
  bool enable_dp_attention = false;      // required if dp_size > 1
  bool enable_dp_lm_head = false;        // shard the LM head within a group instead of over all ranks
  int64_t ep_num_redundant_experts = 0;  // further copies of experts, over all ranks
  // Which experts each rank has at start: trivial, the path of a JSON file or JSON text
  // (docs/architecture.md).
  std::string init_expert_location = "trivial";
  bool enable_eplb = false;                       // move experts between ranks by their loads
  int64_t eplb_rebalance_num_iterations = 1000;   // steps between two moves; 0: only on demand
  std::string tp_reduce_dtype = "float32";        // of partial sums between GPUs: float32 | bfloat16
  int64_t a2a_memory_budget = int64_t{64} << 20;  // heap bytes for each rank's transport
  bool a2a_checksum = false;                      // verify every transported row
  double comm_timeout = 10;                       // seconds a rank waits for a peer before the job fails

  // Checks and tuning before serving.
  std::string self_test = "off";  // fast (one layer) | full (all layers) | off
  bool disable_autotune = false;  // use the default tactics
  double autotune_budget = 2;     // seconds; 0: no autotuning
  std::string autotune_cache;     // path of the tactic cache; empty: in the user's cache folder

  // Memory and scheduling. With dp_size > 1 the groups share the request and prefill limits evenly.
  int64_t max_total_tokens = 0;  // KV pool size of each group in tokens; 0: from mem_fraction_static
  // Fraction of free memory for weights, KV pool and, on a GPU, work memory; -1: 0.6 on a CPU, 0.9 on a GPU
  double mem_fraction_static = -1;
  int page_size = 16;  // tokens per KV page
  // Tokens held by layers with a sliding window, as a fraction of those held by other layers; 0: as many as
  // the running requests need, and some for the prefix cache.
  double swa_full_tokens_ratio = 0;
  bool disable_hybrid_swa_memory = false;  // layers with a sliding window hold all tokens too
  // Models with recurrent layers. Slots for the states of running requests and for snapshots that the prefix
  // cache keeps, of each group; 0: as many as fit in mamba_full_memory_ratio times the memory of the KV
  // pages, but at most 5 for each running request.
  int64_t max_mamba_cache_size = 0;
  double mamba_full_memory_ratio = 0.9;
  int64_t mamba_track_interval = 256;  // most tokens between two snapshots of a request's state
  bool disable_radix_cache = false;    // do not reuse the KV pages of earlier requests with a common prefix
  int max_running_requests = 64;       // maximum in one batch
  int max_queued_requests = 4096;      // maximum waiting; if it is reached, submit() returns kUnavailable
  // Maximum prompt tokens in one step, per request and for all requests; 0: 512 on a CPU, 8192 on a GPU.
  int64_t chunked_prefill_size = 0;
  int64_t max_prefill_tokens = 0;
  // Scales the fraction of outstanding output tokens for which admission reserves KV pages; at 1, that
  // fraction starts at 0.7 and adapts. Larger: fewer retractions; smaller: more requests run at once.
  double schedule_conservativeness = 1;
  // Admit waiting requests by descending priority, then by arrival.
  bool enable_priority_scheduling = false;
  bool schedule_low_priority_values_first = false;  // ascending priority instead
  // Without enable_priority_scheduling: refuse requests with a priority; false: ignore priorities, warn once
  bool abort_on_priority_when_disabled = false;
  uint64_t random_seed = 0;  // seeds requests that have no seed

  // Speculative decoding: each step also computes draft tokens, and keeps those that sampling would have
  // chosen anyway, so the output does not change; on a GPU only with enable_deterministic_inference, because
  // otherwise the last bits of logits depend on the number of rows.
  // none | NGRAM (drafts from the request's own tokens) | STANDALONE (from a smaller model) | EAGLE or NEXTN
  // (from the model's MTP layer) | EAGLE3 (from an EAGLE-3 head)
  std::string speculative_algorithm = "none";
  std::string speculative_draft_model_path;  // STANDALONE, EAGLE3: a checkpoint folder
  int speculative_num_draft_tokens = 4;      // most rows of a request in a step: its last token and drafts
  int speculative_num_steps = 0;      // of a draft model: the drafts; 0: speculative_num_draft_tokens - 1
  int speculative_eagle_topk = 0;     // branches of a draft; only 1; 0: 1
  bool speculative_adaptive = false;  // draft only as far as it pays
  // Drafts continue the latest earlier occurrence of the last tokens, if at least min of them match; the
  // occurrence that matches the most of the last max tokens is used.
  int speculative_ngram_min_match_window_size = 2, speculative_ngram_max_match_window_size = 12;
  DraftSource draft_source;  // with NGRAM: proposes all drafts instead; empty: repetitions
  // For measurements: a draft is kept with this probability if the one before it is, whatever the model
  // computes, so the output is no longer the model's; < 0: drafts are compared
  double speculative_synthetic_acceptance = -1;
  // GPU, with a draft model that takes features: accept drafts on the device, so that the next step is
  // enqueued before the host knows them. Without a flag: it gains little (docs/decisions.md).
  bool speculative_accepts_on_device = false;

  // Seconds; 0: no limit. A request past its limit ends with kUnavailable if queued, kDeadline if running.
  double req_waiting_timeout = 0;  // from submission to the first computed token
  double req_running_timeout = 0;  // from the first computed token to the end
  double watchdog_timeout = 300;   // for one step; after it, the engine logs its state and fails

  // Prefill-decode disaggregation: a prefill node computes prompts and first tokens, and a decode node
  // computes the rest (docs/disaggregation.md).
  std::string disaggregation_mode = "null";  // null (one engine does prefill and decode) | prefill | decode
  // A prefill node listens here for decode nodes. Any address other than loopback requires a secret.
  std::string disaggregation_bootstrap_host = "127.0.0.1";
  int disaggregation_bootstrap_port = 8998;  // 0: any free port
  double disaggregation_timeout = 300;       // seconds a prefill node holds KV pages that are not fetched
  // File with the secret that all prefill and decode nodes share; empty: loopback connections only, without
  // authentication.
  std::string disaggregation_secret_file;
  // Prefill nodes that a decode node's requests may name, as HOST, HOST:PORT or *; empty: loopback only.
  std::vector<std::string> disaggregation_allowed_hosts;
  // Prefill node: maximum authenticated connections. Decode node: maximum prefill nodes that it remembers.
  int disaggregation_max_connections = 64;
  // Time limit in seconds for a hello, and for a frame, which gets 1 s more per 256 KiB transferred.
  double disaggregation_io_timeout = 10;

  // GPU: decode batch sizes that are captured as CUDA graphs.
  bool disable_cuda_graph = false;     // launch every kernel of every step
  int64_t cuda_graph_max_bs = 0;       // largest captured size, in requests; 0: the largest of all sizes
  std::vector<int64_t> cuda_graph_bs;  // sizes, in requests; empty: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, ...

  // SGLang's flags that have no field above, as given ("--name", value or empty), and the SGLANG_*
  // environment variables that are set. Each is applied, refused, or ignored with a log line.
  std::vector<NamedValue> sglang_flags;
  std::vector<NamedValue> environment;

  LogSink log_sink;            // empty: log lines are dropped
  ProgressSink progress_sink;  // empty: no progress reports
};

}  // namespace fp4moe
