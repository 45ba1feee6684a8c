// EngineConfig: everything that decides how a model is loaded and run. Field names are the
// server's flags (SGLang's names) with '-' as '_'; tools fill it from the command line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/sinks.h"

namespace fp4moe {

struct NamedValue {
  std::string name, value;
};

struct EngineConfig {
  // Model.
  std::string model_path;             // folder with config.json and safetensors
  std::string load_format = "auto";   // auto (= safetensors) | safetensors | dummy: random weights of
                                      // config.json's shapes; needs no other file
  bool allow_unused_tensors = false;  // else a tensor of the model that nothing reads is an error
  std::string tokenizer_path;         // folder or tokenizer.json; empty: model_path
  std::string chat_template;          // file with a Jinja template; empty: the checkpoint's
  std::string served_model_name;      // empty: the folder's name
  std::string quantization =
      "auto";  // auto | mxfp4 | modelopt_fp4 | compressed-tensors: must agree with the checkpoint
  std::string kv_cache_dtype = "auto";  // auto | bfloat16
  std::string dtype = "auto";           // activations: auto (= bfloat16) | bfloat16 | float32
  std::string dense_quant = "none";     // weights of dense layers: none (= bf16) | q8 (8 bits; on a CPU)
  std::string weight_cache_dir;         // on a CPU, packed weights are kept there; empty: in the user's cache
                                        // folder; none: nowhere
  std::string grammar_backend = "auto";  // structured output: auto (xgrammar where the build has it) |
                                         // xgrammar | none
  double grammar_compile_timeout = 20;   // seconds that one grammar may compile
  // Steps of work that a grammar may take for one token. Over it, and over the sizes below, its request
  // fails.
  int64_t grammar_max_steps = 20'000'000;
  int64_t grammar_max_bytes = 64 << 20;     // of one compiled grammar
  int64_t grammar_cache_bytes = 128 << 20;  // of the compiled grammars that are kept, those used last
  int64_t context_length = 0;               // tokens; 0: max_position_embeddings

  // Where and how it runs.
  std::string device = "auto";  // auto | cpu | cuda
  int threads = 0;              // 0: all cores this process may use
  std::string moe_runner_backend = "auto";
  std::string moe_a2a_backend = "none";
  std::string fp4_compute = "auto";                     // auto | w4a16 | w4a4 | w4a8
  std::string fp4_act_scales = "auto";                  // w4a4: auto | static (the checkpoint's) | per_token
  std::string deepep_mode = "auto";                     // auto | low_latency (normal is refused)
  std::string deepep_dispatcher_output_dtype = "auto";  // auto | bf16 | fp8 | nvfp4
  std::string flashinfer_dispatcher_output_dtype = "auto";  // auto | bf16 | nvfp4
  std::string flashinfer_combine_dtype = "auto";            // auto (= bf16) | bf16 | fp8
  bool disable_fp4_allgather = false;  // a2a none under DP attention: gather unquantised rows
  bool enable_deterministic_inference = false;

  // Ranks.
  std::string fabric = "auto";  // auto | local | threads | mpi
  int tp_size = 1;              // ranks in all
  int ep_size = 1;              // 1: experts sharded along I; tp_size: whole experts
  int dp_size = 1;              // groups of tp_size / dp_size ranks with their own requests
  bool enable_dp_attention = false;
  bool enable_dp_lm_head = false;
  int64_t a2a_memory_budget = int64_t{64} << 20;  // bytes a rank's transport may use
  bool a2a_checksum = false;                      // verify every transported row
  double comm_timeout = 10;                       // seconds a rank waits for another one

  // Checks and tuning before serving.
  std::string self_test = "off";  // fast | full | off
  bool disable_autotune = false;
  double autotune_budget = 2;  // seconds
  std::string autotune_cache;  // file; empty: in the user's cache folder

  // Memory and scheduling.
  int64_t max_total_tokens = 0;     // tokens in the KV pool; 0: from mem_fraction_static
  double mem_fraction_static = -1;  // share of free memory for weights, KV pool and work; -1: 0.6, GPU 0.9
  int page_size = 16;               // tokens in a KV page
  // No request starts with the KV pages of earlier ones that began alike.
  bool disable_radix_cache = false;
  int max_running_requests = 64;
  int max_queued_requests = 4096;
  int64_t chunked_prefill_size = 0;  // most prompt tokens of one request in one step; 0: 512, GPU 8192
  int64_t max_prefill_tokens = 0;    // most prompt tokens of all requests in one step; 0: 512, GPU 8192
  // How much of the answers still to come is kept room for when a request is admitted: 1 starts at 0.7 of the
  // most they may be, and learns; more retracts fewer requests, less runs more of them at once.
  double schedule_conservativeness = 1;
  // Requests wait in the order of their priorities, larger ones first, and of those in the order of arrival.
  bool enable_priority_scheduling = false;
  bool schedule_low_priority_values_first = false;
  bool abort_on_priority_when_disabled = false;  // else a priority is ignored, with one warning
  uint64_t random_seed = 0;                      // of requests that name no seed

  // Seconds; 0: no limit. Requests that are over time end with kDeadline, or kUnavailable if none of their
  // tokens was computed yet.
  double req_waiting_timeout = 0;  // in the queue
  double req_running_timeout = 0;  // from the first computed token on
  double watchdog_timeout = 300;   // of one step: then the engine's state is logged and the engine has failed

  // Prefill-decode disaggregation: a prefill node computes prompts and first tokens, a decode node the rest
  // (docs/disaggregation.md).
  std::string disaggregation_mode = "null";  // null (one engine does both) | prefill | decode
  // A prefill node listens there for decode nodes. Any other than a loopback address needs a secret.
  std::string disaggregation_bootstrap_host = "127.0.0.1";
  int disaggregation_bootstrap_port = 8998;  // 0: any free one
  double disaggregation_timeout = 300;       // seconds a prefill node holds KV pages that nobody takes
  // File with the secret that all prefill nodes and decode nodes share; empty: loopback connections only,
  // which need none.
  std::string disaggregation_secret_file;
  // HOST, HOST:PORT or * each: the prefill nodes that a decode node's requests may name; none: loopback ones.
  std::vector<std::string> disaggregation_allowed_hosts;
  int disaggregation_max_connections = 64;  // between a node and others, at a time
  double disaggregation_io_timeout = 10;    // seconds of a hello, and of a frame beside 1 s for each 256 KiB

  // A GPU's decode steps: sizes that are recorded as CUDA graphs.
  bool disable_cuda_graph = false;
  int64_t cuda_graph_max_bs = 0;       // no graph for more rows; 0: max_running_requests
  std::vector<int64_t> cuda_graph_bs;  // sizes; empty: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, ...

  // What came with the flags and has no field above: SGLang's other flags as they were given ("--name", value
  // or empty), and the SGLANG_* environment variables that are set. They are judged as the flags are, and
  // said.
  std::vector<NamedValue> sglang_flags;
  std::vector<NamedValue> environment;

  LogSink log_sink;            // empty: log lines are dropped
  ProgressSink progress_sink;  // may be empty
};

}  // namespace fp4moe
