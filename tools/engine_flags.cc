#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "comm/job.h"
#include "config_file.h"
#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "io/hub_cache.h"
#include "model/sglang_names.h"
#include "moe/plan/plan.h"
#include "subcommand.h"

namespace fp4moe {

int report_error(const Status& status) {
  std::fprintf(stderr, "error: %s\n", status.message().c_str());
  switch (status.code()) {
    case StatusCode::kOk:
      return kExitOk;
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
      return kExitUsage;
    case StatusCode::kUnsupported:
      return kExitUnsupported;
    case StatusCode::kDoesNotFit:
      return kExitDoesNotFit;
    case StatusCode::kInternal:
      return kExitSelfTest;
    default:
      return kExitFailure;
  }
}

namespace {

// Adds the options of one help group and gives each an environment variable.
class Group {
 public:
  Group(CLI::App& subcommand, const char* name) : subcommand_(subcommand), name_(name) {}

  template <class T>
  CLI::Option* value(const std::string& names, T& field, const std::string& help) {
    return subcommand_.add_option(names, field, help)
        ->capture_default_str()
        ->envname(environment_name(names))
        ->group(name_);
  }
  // A flag whose values the engine checks: the list is for the help, the documents and the completion.
  void choice(const std::string& names, std::string& field, const std::vector<std::string>& choices,
              const std::string& help) {
    std::string list;
    for (const std::string& name : choices) list += (list.empty() ? "" : ",") + name;
    value(names, field, help)->type_name("TEXT:{" + list + "}");
  }
  void on(const std::string& names, bool& field, const std::string& help) {
    subcommand_.add_flag(names, field, help)->envname(environment_name(names))->group(name_);
  }

 private:
  CLI::App& subcommand_;
  const char* name_;
};

// The words after the first name are names too, as in vLLM. But if `path` is not given elsewhere, the last
// word is the model: "--served-model-name NAME MODEL --port 1".
void add_served_names(CLI::App& subcommand, CLI::Option& path, std::vector<std::string>& names) {
  const auto read = [&path, &names](const std::vector<std::string>& words) {
    names = words;
    if (path.count() > 0 || names.size() < 2) return;
    path.add_result(names.back());
    path.run_callback();
    names.pop_back();
  };
  const std::string flag = "--served-model-name";
  subcommand
      .add_option_function<std::vector<std::string>>(
          flag, read,
          "names that requests may use, the first in responses; default: the repository id or the "
          "checkpoint folder's name")
      ->envname(environment_name(flag))
      ->group("Model");
}

void add_model_flags(CLI::App& subcommand, EngineConfig& c) {
  Group model(subcommand, "Model");
  CLI::Option* path = model.value("model,--model-path,--model", c.model_path,
                                  "checkpoint folder, or a repository id in the local Hugging Face cache");
  path->required()->type_name("FOLDER");
  add_revision_flag(subcommand, c.model_path, &c)->group("Model")->envname("FP4MOE_REVISION");
  model.choice(
      "--load-format", c.load_format, {"auto", "safetensors", "dummy"},
      "format of the weights; auto: safetensors; dummy: random weights with the shapes in config.json");
  model.value(
      "--weight-version", c.weight_version,
      "names the weights of the start; /model_info returns it, and nodes of disaggregated serving must "
      "agree on it");
  model.on(
      "--allow-unused-tensors", c.allow_unused_tensors,
      "if the checkpoint contains model tensors that the engine does not use, warn instead of refusing it");
  model
      .value(
          "--weight-cache-dir", c.weight_cache_dir,
          "CPU: folder that caches packed weights for the next start; default: in the user's cache folder; "
          "none: no cache")
      ->type_name("FOLDER");
  model
      .value("--tokenizer-path", c.tokenizer_path,
             "folder, tokenizer.json or tiktoken.model; default: the checkpoint's")
      ->type_name("FILE");
  model
      .value("--chat-template", c.chat_template, "file with a Jinja chat template; default: the checkpoint's")
      ->type_name("FILE");
  add_served_names(subcommand, *path, c.served_model_name);
  model.choice("--quantization", c.quantization,
               {"auto", "mxfp4", "modelopt_fp4", "compressed-tensors", "quark", "fp8"},
               "quantization of the experts; must agree with the checkpoint");
  model.choice("--dtype", c.dtype, {"auto", "bfloat16", "float32"}, "activation type; auto: bfloat16");
  model.choice(
      "--dense-quant", c.dense_quant, {"none", "q8", "fp8"},
      "format for dense weights that are bf16 in the checkpoint; none: bf16; q8: 8-bit integers, CPU "
      "only; fp8: E4M3, less exact than q8");
  model.choice("--kv-cache-dtype", c.kv_cache_dtype, {"auto", "bfloat16", "fp8_e4m3"},
               "type of the KV cache; auto: bfloat16, even if the checkpoint declares FP8; fp8_e4m3: 8 bits, "
               "with the checkpoint's scales");
  model.choice("--grammar-backend", c.grammar_backend, {"auto", "xgrammar", "none"},
               "library for structured output; auto: xgrammar if the build has it");
  model.value("--grammar-compile-timeout", c.grammar_compile_timeout,
              "maximum seconds for compiling one grammar before its requests get 504");
  model.value("--grammar-max-steps", c.grammar_max_steps,
              "maximum grammar steps for one token, 2 to 9 ns each; a request that needs more gets 400");
  model.value("--grammar-max-bytes", c.grammar_max_bytes,
              "maximum bytes of one compiled grammar; a request with a larger one gets 400");
  model.value("--grammar-cache-bytes", c.grammar_cache_bytes,
              "maximum bytes of compiled grammars cached for later requests");
  model.value("--context-length,--max-model-len", c.context_length,
              "maximum tokens per request, prompt and output together; 0: the model's limit");
}

void add_moe_flags(CLI::App& subcommand, EngineConfig& c) {
  Group moe(subcommand, "Experts");
  moe.choice("--moe-runner-backend", c.moe_runner_backend, runner_names(),
             "runner for the experts; `fp4moe backends` shows where each one runs");
  moe.choice("--moe-a2a-backend", c.moe_a2a_backend, a2a_names(), "all-to-all protocol");
  moe.choice("--fp4-compute", c.fp4_compute, {"auto", "w4a16", "w4a4", "w4a8"},
             "scheme; auto: implied by the runner's name");
  moe.choice("--fp4-act-scales", c.fp4_act_scales, {"auto", "static", "per_token"},
             "activation scales for w4a4; static: from the checkpoint");
  moe.choice("--deepep-mode", c.deepep_mode, {"auto", "low_latency"}, "mode of --moe-a2a-backend deepep");
  moe.choice("--deepep-dispatcher-output-dtype", c.deepep_dispatcher_output_dtype,
             {"auto", "bf16", "fp8", "nvfp4"}, "format of dispatched rows with --moe-a2a-backend deepep");
  moe.choice("--flashinfer-dispatcher-output-dtype", c.flashinfer_dispatcher_output_dtype,
             {"auto", "bf16", "nvfp4"}, "format of dispatched rows with --moe-a2a-backend flashinfer");
  moe.choice("--flashinfer-combine-dtype", c.flashinfer_combine_dtype, {"auto", "bf16", "fp8"},
             "format of combined results; auto: bf16");
  moe.on("--disable-fp4-allgather,--disable-flashinfer-cutlass-moe-fp4-allgather", c.disable_fp4_allgather,
         "gather unquantised rows if data-parallel attention is used with --moe-a2a-backend none");
  moe.on("--enable-deterministic-inference", c.enable_deterministic_inference,
         "produce the same bits on any number of ranks and, on GPUs, in any batch; slower");
}

void add_rank_flags(CLI::App& subcommand, EngineConfig& c) {
  Group ranks(subcommand, "Ranks");
  ranks.choice("--fabric", c.fabric, {"auto", "local", "threads", "mpi"}, "how the ranks communicate");
  ranks.value("--tp-size,--tp,--tensor-parallel-size", c.tp_size, "total number of ranks");
  ranks.value("--ep-size,--ep,--expert-parallel-size", c.ep_size,
              "number of ranks that divide the experts among them; 1: each rank has a shard of every "
              "expert; otherwise equal to --tp-size");
  ranks.value("--dp-size,--dp,--data-parallel-size", c.dp_size,
              "number of data-parallel groups of ranks; each group runs separate requests");
  ranks.on("--enable-dp-attention", c.enable_dp_attention, "use data-parallel attention");
  ranks.on("--enable-dp-lm-head", c.enable_dp_lm_head, "each data-parallel group computes its own logits");
  ranks.value("--a2a-memory-budget", c.a2a_memory_budget, "maximum bytes for each rank's transport");
  ranks.on("--a2a-checksum", c.a2a_checksum, "verify every transported row");
  ranks.value("--ep-num-redundant-experts", c.ep_num_redundant_experts,
              "copies of experts beyond one of each, over all ranks; needs --moe-a2a-backend deepep");
  ranks.value("--init-expert-location", c.init_expert_location,
              "experts that each rank has at start: trivial, or a JSON file with SGLang's "
              "physical_to_logical_map or logical_count, or a response of /expert_load");
  ranks.on("--enable-eplb", c.enable_eplb,
           "move experts between ranks by their loads; POST /rebalance_experts does so at once");
  ranks.value("--eplb-rebalance-num-iterations", c.eplb_rebalance_num_iterations,
              "steps between two moves with --enable-eplb; 0: only on demand");
  ranks.choice("--tp-reduce-dtype", c.tp_reduce_dtype, {"float32", "bfloat16"},
               "format in which GPUs send the partial sums of tensor parallelism; they are added in float32");
  ranks.value("--comm-timeout", c.comm_timeout, "maximum seconds that a rank waits for another rank");
}

void add_state_flags(Group& memory, EngineConfig& c) {
  memory.value(
      "--max-mamba-cache-size", c.max_mamba_cache_size,
      "models with recurrent layers: slots for the states of running requests and for snapshots that "
      "reused prefixes need, in each data-parallel group; 0: from --mamba-full-memory-ratio");
  memory.value("--mamba-full-memory-ratio", c.mamba_full_memory_ratio,
               "memory of these slots, as a fraction of that of the KV pages; at most 5 slots per running "
               "request are used");
  memory.value("--mamba-track-interval", c.mamba_track_interval,
               "most tokens between two snapshots of a request's state, rounded to whole pages");
}

void add_execution_flags(CLI::App& subcommand, EngineConfig& c) {
  Group run(subcommand, "Execution");
  run.choice("--device", c.device, {"auto", "cpu", "cuda"}, "device that runs the model");
  run.value("--threads", c.threads, "CPU threads; 0: all cores");
  run.choice("--self-test", c.self_test, {"fast", "full", "off"},
             "self-test before the first request; fast: one layer; full: all layers");
  run.on("--disable-autotune,--disable-flashinfer-autotune", c.disable_autotune,
         "use the default tactics instead of timing candidates");
  run.value("--autotune-budget", c.autotune_budget,
            "maximum seconds for timing tactics at startup; 0: no autotuning");
  run.value("--autotune-cache", c.autotune_cache,
            "file that caches timed tactics; default: in the user's cache folder")
      ->type_name("FILE");
  Group memory(subcommand, "Memory and scheduling");
  memory.value("--max-total-tokens", c.max_total_tokens,
               "tokens in the KV pool of each data-parallel group; 0: from --mem-fraction-static");
  memory.value("--mem-fraction-static", c.mem_fraction_static,
               "fraction of free memory for weights, KV pool and workspaces; -1: 0.6 on a CPU, 0.9 on a GPU");
  memory.value("--page-size", c.page_size, "tokens per KV page");
  memory.value(
      "--swa-full-tokens-ratio", c.swa_full_tokens_ratio,
      "tokens held by layers with a sliding window, as a fraction of the KV pool's tokens; 0: as many "
      "as running requests need, and some for reused prefixes");
  memory.on("--disable-hybrid-swa-memory", c.disable_hybrid_swa_memory,
            "layers with a sliding window hold all tokens, like other layers");
  add_state_flags(memory, c);
  memory.on("--disable-radix-cache", c.disable_radix_cache,
            "compute every prompt in full; do not reuse prefixes of earlier requests");
  memory.value("--max-running-requests", c.max_running_requests, "maximum requests in one batch");
  memory.value("--max-queued-requests", c.max_queued_requests,
               "maximum waiting requests; further requests get 503");
  memory.value("--schedule-conservativeness", c.schedule_conservativeness,
               "scales the KV space reserved for outputs at admission; higher: fewer retractions; lower: "
               "more running requests");
  memory.on("--enable-priority-scheduling", c.enable_priority_scheduling,
            "admit requests in order of their `priority` field, larger values first");
  memory.on("--schedule-low-priority-values-first", c.schedule_low_priority_values_first,
            "with --enable-priority-scheduling, admit smaller values first");
  memory.on("--abort-on-priority-when-disabled", c.abort_on_priority_when_disabled,
            "without --enable-priority-scheduling, refuse requests that have a priority; default: warn once");
  memory.value("--req-waiting-timeout", c.req_waiting_timeout,
               "maximum seconds that a request waits before it gets 503; 0: no limit");
  memory.value("--req-running-timeout", c.req_running_timeout,
               "maximum seconds that a request runs before it gets 504; 0: no limit");
  memory.value("--watchdog-timeout", c.watchdog_timeout,
               "maximum seconds for a step before the server logs its state and exits; 0: no limit");
  memory.value("--chunked-prefill-size", c.chunked_prefill_size,
               "maximum prompt tokens per request and step; 0: 512 on a CPU, 8192 on a GPU");
  memory.value("--max-prefill-tokens", c.max_prefill_tokens,
               "maximum prompt tokens per step; 0: 512 on a CPU, 8192 on a GPU");
  memory.value("--cuda-graph-max-bs,--cuda-graph-max-bs-decode", c.cuda_graph_max_bs,
               "GPU: largest decode batch size to capture as a CUDA graph; 0: no limit");
  memory.value("--cuda-graph-bs,--cuda-graph-bs-decode", c.cuda_graph_bs,
               "GPU: decode batch sizes to capture as CUDA graphs");
  memory.on("--disable-cuda-graph", c.disable_cuda_graph,
            "GPU: launch each kernel separately, without CUDA graphs");
  memory.value("--random-seed", c.random_seed, "seed for requests that do not specify one");
}

void add_speculative_flags(CLI::App& subcommand, EngineConfig& c) {
  Group group(subcommand, "Speculative decoding");
  group.choice(
      "--speculative-algorithm", c.speculative_algorithm,
      {"none", "NGRAM", "EAGLE", "NEXTN", "EAGLE3", "STANDALONE"},
      "how tokens are drafted, which does not change the output; NGRAM: from repetitions in the request's "
      "tokens; EAGLE, NEXTN: by the checkpoint's layer for multi-token prediction; EAGLE3: by an EAGLE-3 "
      "head; STANDALONE: by a smaller model");
  group
      .value("--speculative-draft-model-path,--speculative-draft-model", c.speculative_draft_model_path,
             "the draft model's checkpoint folder")
      ->type_name("FOLDER");
  group.value("--speculative-num-steps", c.speculative_num_steps,
              "tokens that a draft model proposes for a request and step; 0: one less than "
              "--speculative-num-draft-tokens");
  group.value("--speculative-eagle-topk", c.speculative_eagle_topk,
              "branches of a draft model's proposal; only 1; 0: 1");
  group.value("--speculative-num-draft-tokens", c.speculative_num_draft_tokens,
              "most rows of a request in a step: its last token and the drafts after it");
  group.on("--speculative-adaptive", c.speculative_adaptive,
           "draft only as far as it pays, from each request's acceptance and the measured step times");
  group.value("--speculative-ngram-min-match-window-size", c.speculative_ngram_min_match_window_size,
              "fewest last tokens that must have occurred before");
  group.value("--speculative-ngram-max-match-window-size", c.speculative_ngram_max_match_window_size,
              "most last tokens that are compared");
}

// Adds SGLang's flags that have no config field. They are recorded as given; plan_model() checks them.
void add_sglang_flags(CLI::App& subcommand, EngineConfig& c) {
  for (const SglangFlag& flag : sglang_flags()) {
    const std::string names = flag.names;
    const std::string name = names.substr(0, names.find(','));
    const std::string help = flag.fate == SglangFlag::Fate::kMoot ? "accepted without effect" : "refused";
    const auto note = [&c, name](const std::string& value) { c.sglang_flags.push_back({name, value}); };
    CLI::Option* option = flag.num_values == 0 ? subcommand.add_flag_callback(
                                                     names, [note] { note(""); }, help)
                          : flag.num_values == 1
                              ? subcommand.add_option_function<std::string>(names, note, help)
                              : subcommand.add_option_function<std::vector<std::string>>(
                                    names,
                                    [note](const std::vector<std::string>& values) {
                                      std::string joined;
                                      for (const std::string& value : values)
                                        joined += (joined.empty() ? "" : " ") + value;
                                      note(joined);
                                    },
                                    help);
    option->group("SGLang compatibility");
  }
}

// Replaces `path`, and the tokenizer's and the draft model's path, by the folder that it means.
Status find_in_cache(std::string& path, const std::string& revision, EngineConfig* config) {
  if (path.empty()) return {};
  const std::string cache = hub_cache_folder([](const char* name) { return std::getenv(name); });
  FP4MOE_ASSIGN_OR_RETURN(const FoundModel model, find_model(path, revision, cache));
  path = model.path;
  if (config == nullptr) return {};
  if (config->served_model_name.empty() && !model.name.empty()) config->served_model_name = {model.name};
  for (std::string* other : {&config->tokenizer_path, &config->speculative_draft_model_path}) {
    if (other->empty()) continue;
    FP4MOE_ASSIGN_OR_RETURN(const FoundModel found, find_model(*other, "", cache));
    *other = found.path;
  }
  return {};
}

}  // namespace

int follow(EngineConfig config) {
  // mpirun forwards signals to every process, but only process 0 handles them, because it decides how running
  // requests end.
  signal(SIGTERM, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  const std::string process = "process " + std::to_string(launcher_info().process);
  config.log_sink = [process](LogLevel level, const std::string& line) {
    if (level >= LogLevel::kError) std::fprintf(stderr, "%s: error: %s\n", process.c_str(), line.c_str());
  };
  const Status status = Engine::follow(config);
  return status.ok() ? kExitOk : report_error(status.with_context(process));
}

CLI::Option* add_revision_flag(CLI::App& subcommand, std::string& path, EngineConfig* config) {
  const auto revision = std::make_shared<std::string>();
  subcommand.parse_complete_callback([&subcommand, &path, config, revision] {
    if (!subcommand.remaining().empty()) return;  // unknown flags, which CLI11 refuses after this callback
    if (const Status status = find_in_cache(path, *revision, config); !status.ok())
      throw CLI::RuntimeError(report_error(status));
  });
  return subcommand.add_option("--revision", *revision,
                               "branch, tag or commit hash in the local Hugging Face cache; default: main");
}

void add_engine_flags(CLI::App& subcommand, EngineConfig& config) {
  add_model_flags(subcommand, config);
  add_moe_flags(subcommand, config);
  add_rank_flags(subcommand, config);
  add_execution_flags(subcommand, config);
  add_speculative_flags(subcommand, config);
  add_sglang_flags(subcommand, config);
  for (const char* name : sglang_environment())
    if (const char* value = std::getenv(name)) config.environment.push_back({name, value});
}

}  // namespace fp4moe
