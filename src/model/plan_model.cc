#include "model/plan_model.h"

#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "comm/job.h"
#include "device/peer_heap.h"
#include "kernels/ops.h"
#include "model/plan_placements.h"
#include "model/resolve_flags.h"

namespace fp4moe {
namespace {

Status check_range(const char* flag, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  const std::string legal = high == INT64_MAX ? "at least " + std::to_string(low)
                                              : std::to_string(low) + " to " + std::to_string(high);
  return invalid_argument(std::string(flag) + " " + std::to_string(value) + " is out of range; it must be " +
                          legal);
}

Status check_seconds(const char* flag, double value) {
  if (value >= 0 && value <= 1e9) return {};  // false for NaN
  return invalid_argument(std::string(flag) + " " + std::to_string(value) +
                          " must be between 0 (no limit) and 1000000000 seconds");
}

// Sets the defaults in `flags` that `given` leaves to the device.
void take_device_defaults(const EngineConfig& given, DeviceKind device, EngineConfig& flags) {
  const bool is_gpu = device == DeviceKind::kCuda;
  if (given.mem_fraction_static == -1) flags.mem_fraction_static = is_gpu ? 0.9 : 0.6;
  if (given.chunked_prefill_size == 0) flags.chunked_prefill_size = is_gpu ? 8192 : 512;
  if (given.max_prefill_tokens == 0) flags.max_prefill_tokens = is_gpu ? 8192 : 512;
}

void note_graph_flags(const EngineConfig& flags) {
  const auto note = [](const std::string& flag) {
    log_info(flag + " is ignored: it configures CUDA graphs, which CPU ranks do not capture");
  };
  std::string sizes;
  for (const int64_t rows : flags.cuda_graph_bs) sizes += " " + std::to_string(rows);
  if (flags.cuda_graph_max_bs != 0) note("--cuda-graph-max-bs " + std::to_string(flags.cuda_graph_max_bs));
  if (!sizes.empty()) note("--cuda-graph-bs" + sizes);
  if (flags.disable_cuda_graph) note("--disable-cuda-graph");
}

// Only for plans on a GPU.
void note_determinism(const EngineConfig& flags) {
  if (!flags.enable_deterministic_inference) return;
  log_info(
      "--enable-deterministic-inference uses one algorithm for every batch on a GPU; docs/perf.md gives its "
      "cost");
}

// Refuses only absurd values; whether a large value fits is checked when memory is planned.
Status check_ranges(const EngineConfig& flags) {
  constexpr int64_t kMany = 1 << 20;  // keeps every product of two of these in 64 bits
  FP4MOE_RETURN_IF_ERROR(check_range("--threads", flags.threads, 0, 4096));
  FP4MOE_RETURN_IF_ERROR(check_range("--page-size", flags.page_size, 1, 4096));
  FP4MOE_RETURN_IF_ERROR(check_range("--max-running-requests", flags.max_running_requests, 1, kMany));
  FP4MOE_RETURN_IF_ERROR(check_range("--max-queued-requests", flags.max_queued_requests, 1, kMany));
  FP4MOE_RETURN_IF_ERROR(check_range("--chunked-prefill-size", flags.chunked_prefill_size, 1, kMany));
  FP4MOE_RETURN_IF_ERROR(check_range("--max-prefill-tokens", flags.max_prefill_tokens, 1, kMany));
  const int64_t min_match = flags.speculative_ngram_min_match_window_size;
  FP4MOE_RETURN_IF_ERROR(
      check_range("--speculative-num-draft-tokens", flags.speculative_num_draft_tokens, 2, 64));
  FP4MOE_RETURN_IF_ERROR(check_range("--speculative-num-steps", flags.speculative_num_steps, 0, 63));
  FP4MOE_RETURN_IF_ERROR(check_range("--speculative-ngram-min-match-window-size", min_match, 1, 64));
  FP4MOE_RETURN_IF_ERROR(check_range("--speculative-ngram-max-match-window-size",
                                     flags.speculative_ngram_max_match_window_size, min_match, 64));
  FP4MOE_RETURN_IF_ERROR(check_range("--cuda-graph-max-bs", flags.cuda_graph_max_bs, 0, kMany));
  for (const int64_t rows : flags.cuda_graph_bs)
    FP4MOE_RETURN_IF_ERROR(check_range("--cuda-graph-bs", rows, 1, kMany));
  FP4MOE_RETURN_IF_ERROR(check_range("--context-length", flags.context_length, 0, INT64_MAX));
  FP4MOE_RETURN_IF_ERROR(check_range("--max-total-tokens", flags.max_total_tokens, 0, INT64_MAX));
  FP4MOE_RETURN_IF_ERROR(
      check_range("--eplb-rebalance-num-iterations", flags.eplb_rebalance_num_iterations, 0, INT64_MAX));
  FP4MOE_RETURN_IF_ERROR(check_range("--a2a-memory-budget", flags.a2a_memory_budget, 1, int64_t{1} << 40));
  if (!(flags.comm_timeout > 0 && flags.comm_timeout <= 86400))
    return invalid_argument("--comm-timeout " + std::to_string(flags.comm_timeout) +
                            " must be above 0 and at most 86400 seconds");
  FP4MOE_RETURN_IF_ERROR(check_seconds("--req-waiting-timeout", flags.req_waiting_timeout));
  FP4MOE_RETURN_IF_ERROR(check_seconds("--req-running-timeout", flags.req_running_timeout));
  FP4MOE_RETURN_IF_ERROR(check_seconds("--watchdog-timeout", flags.watchdog_timeout));
  if (!(flags.grammar_compile_timeout > 0 && flags.grammar_compile_timeout <= 86400))
    return invalid_argument("--grammar-compile-timeout " + std::to_string(flags.grammar_compile_timeout) +
                            " must be above 0 and at most 86400 seconds");
  FP4MOE_RETURN_IF_ERROR(check_range("--grammar-max-steps", flags.grammar_max_steps, 1, INT64_MAX));
  FP4MOE_RETURN_IF_ERROR(check_range("--grammar-max-bytes", flags.grammar_max_bytes, 1, int64_t{1} << 40));
  FP4MOE_RETURN_IF_ERROR(
      check_range("--grammar-cache-bytes", flags.grammar_cache_bytes, 0, int64_t{1} << 40));
  if (!(flags.schedule_conservativeness >= 0 && flags.schedule_conservativeness <= 100))
    return invalid_argument("--schedule-conservativeness " + std::to_string(flags.schedule_conservativeness) +
                            " must be between 0 and 100");
  if (!(flags.autotune_budget >= 0 && flags.autotune_budget <= 3600))
    return invalid_argument("--autotune-budget " + std::to_string(flags.autotune_budget) +
                            " must be between 0 and 3600 seconds");
  if (!(flags.swa_full_tokens_ratio >= 0 && flags.swa_full_tokens_ratio <= 1))
    return invalid_argument("--swa-full-tokens-ratio " + std::to_string(flags.swa_full_tokens_ratio) +
                            " must be between 0 and 1");
  FP4MOE_RETURN_IF_ERROR(check_range("--max-mamba-cache-size", flags.max_mamba_cache_size, 0, kMany));
  FP4MOE_RETURN_IF_ERROR(check_range("--mamba-track-interval", flags.mamba_track_interval, 1, kMany));
  if (!(flags.mamba_full_memory_ratio > 0 && flags.mamba_full_memory_ratio <= 100))
    return invalid_argument("--mamba-full-memory-ratio " + std::to_string(flags.mamba_full_memory_ratio) +
                            " must be above 0 and at most 100");
  if (!(flags.mem_fraction_static > 0 && flags.mem_fraction_static <= 1))  // true for NaN
    return invalid_argument("--mem-fraction-static " + std::to_string(flags.mem_fraction_static) +
                            " must be above 0 and at most 1");
  return {};
}

Result<DType> resolve_dtype(const std::string& name) {
  if (name == "auto" || name == "bfloat16") return DType::kBF16;
  if (name == "float32") return DType::kF32;
  return invalid_argument("--dtype " + name + " is not supported; use auto, bfloat16 or float32");
}

// A declared cache of another type would have scales that do not fit E4M3 codes.
Result<DType> kv_dtype(const EngineConfig& flags, const QuantConfig& quant, DType act_dtype) {
  if (flags.kv_cache_dtype != "fp8_e4m3") return act_dtype;
  if (quant.kv_cache_type.empty() || quant.kv_cache_type == "FP8") return DType::kF8E4M3;
  return unsupported("--kv-cache-dtype fp8_e4m3: " + quant.declared_by + " declares a KV cache of type " +
                     quant.kv_cache_type + "; legal: --kv-cache-dtype auto");
}

Status check_quantization(const ModelConfig& model, const std::string& flag) {
  const std::string declared = quantization_name(model.quant);
  if (flag != "auto" && flag != "mxfp4" && flag != "modelopt_fp4" && flag != "compressed-tensors" &&
      flag != "quark" && flag != "fp8")
    return invalid_argument("--quantization " + flag +
                            " is unknown; use auto, mxfp4, modelopt_fp4, compressed-tensors, quark or fp8");
  if (flag != "auto" && model.quant.method == QuantMethod::kNone)
    return unsupported(
        "--quantization " + flag +
        ": the checkpoint declares no FP4 quantization (neither in config.json's quantization_config nor in "
        "hf_quant_config.json); `fp4moe quantize` writes a checkpoint that declares it");
  if (flag != "auto" && flag != declared)
    return unsupported("--quantization " + flag + " contradicts the checkpoint, which is " + declared + " (" +
                       model.quant.declared_by + "); use --quantization " + declared + " or auto");
  return {};
}

Fp4Format expert_format(QuantMethod method) {
  if (method == QuantMethod::kNone) return Fp4Format::kNone;
  return is_mxfp4(method) ? Fp4Format::kMxfp4 : Fp4Format::kNvfp4;
}

Activation activation_of(const ModelConfig& model) {
  if (model.family != ModelFamily::kGptOss) return {.kind = ActivationKind::kSilu};
  return {.kind = ActivationKind::kSwigluOai, .alpha = model.swiglu_alpha, .limit = model.swiglu_limit};
}

MoeChoice moe_choice(const EngineConfig& flags) {
  return {
      .runner = flags.moe_runner_backend,
      .a2a = flags.moe_a2a_backend,
      .fp4_compute = flags.fp4_compute,
      .act_scales = flags.fp4_act_scales,
      .dense_quant = flags.dense_quant,
      .fabric = flags.fabric,
      .tp = flags.tp_size,
      .ep = flags.ep_size,
      .dp = flags.dp_size,
      .num_redundant = flags.ep_num_redundant_experts,
      .places_experts = flags.enable_eplb || flags.init_expert_location != "trivial",
      .enable_dp_attention = flags.enable_dp_attention,
      .deepep_mode = flags.deepep_mode,
      .deepep_payload = flags.deepep_dispatcher_output_dtype,
      .flashinfer_payload = flags.flashinfer_dispatcher_output_dtype,
      .flashinfer_combine = flags.flashinfer_combine_dtype,
      .disable_fp4_allgather = flags.disable_fp4_allgather,
      .deterministic = flags.enable_deterministic_inference,
      .a2a_checksum = flags.a2a_checksum,
      .a2a_memory_budget = flags.a2a_memory_budget,
  };
}

// Runs plan_moe(). On GPUs with several ranks, also checks that each rank has a GPU and that they can share
// memory.
Result<MoePlan> plan_on_gpus(const MoeProblem& problem, const MoeChoice& choice) {
  Result<MoePlan> plan = plan_moe(problem, choice);
  if (!plan.ok() || problem.device != DeviceKind::kCuda || choice.tp == 1 || plan->spans_processes())
    return plan;
  std::vector<int> gpus;
  for (int rank = 0; rank < choice.tp; ++rank) gpus.push_back(gpu_of_rank(rank));
  const Status peers = check_peers(gpus);
  if (!peers.ok()) return peers.with_context("tp=" + std::to_string(choice.tp) + " on device=cuda");
  return plan;
}

// Attention and the dense layers have kernels for Hopper only.
Status check_gpu(const DeviceChoice& device) {
  if (device.kind != DeviceKind::kCuda || device.compute_capability / 10 == 9) return {};
  return unsupported("device=cuda: a GPU of compute capability " +
                     compute_capability_text(device.compute_capability) +
                     " cannot run a model, which needs 9.0 (H100, H200); nearest legal choice: --device cpu");
}

// Only one process can hand over pages, and ranks on GPUs in several processes do not exchange drafts' ids.
Status check_processes(const EngineConfig& flags, const MoePlan& plan) {
  if (!plan.spans_processes() || launcher_info().num_processes == 1) return {};
  if (flags.disaggregation_mode != "null")
    return unsupported("--disaggregation-mode " + flags.disaggregation_mode +
                       " does not support ranks in several processes (--fabric mpi); nearest legal choice: "
                       "one process with --fabric threads");
  if (plan.problem().device != DeviceKind::kCuda || flags.speculative_algorithm == "none") return {};
  return unsupported("--speculative-algorithm " + flags.speculative_algorithm +
                     " is not supported on GPUs in several processes (--fabric mpi); nearest legal choice: "
                     "--speculative-algorithm none");
}

// CPU ranks send f32, and deterministic inference adds no partial sums.
Status check_reduce_dtype(const EngineConfig& flags, DeviceKind device) {
  if (flags.tp_reduce_dtype == "float32") return {};
  const auto refuse = [](const std::string& why) {
    return unsupported("--tp-reduce-dtype bfloat16 " + why +
                       "; nearest legal choice: --tp-reduce-dtype float32");
  };
  if (device != DeviceKind::kCuda) return refuse("is not supported on device=cpu, whose ranks send float32");
  if (flags.enable_deterministic_inference)
    return refuse("has no effect with --enable-deterministic-inference, which sends no partial sums");
  if (flags.tp_size == flags.dp_size)
    return refuse("has no effect with tp=" + std::to_string(flags.tp_size) +
                  " and dp=" + std::to_string(flags.dp_size) + ", where no ranks share a layer's sums");
  return {};
}

// Checks the length of a key; with latent attention a key is a latent and a rotary key. GPU kernels read keys
// in steps of 16.
Status check_head_dim(const ModelConfig& model, DeviceKind device) {
  const bool latent = model.mla.kv_lora_rank > 0;
  const int64_t dim = latent ? model.mla.kv_lora_rank + model.mla.qk_rope_head_dim : model.head_dim;
  const std::string value =
      (latent ? "kv_lora_rank + qk_rope_head_dim = " : "head_dim = ") + std::to_string(dim);
  if (dim > kMaxHeadDim)
    return unsupported(value + " is too large; the limit is " + std::to_string(kMaxHeadDim));
  if (device == DeviceKind::kCuda && dim % 16 != 0)
    return unsupported(value + " on device=cuda; legal: multiples of 16; nearest legal choice: --device cpu");
  return {};
}

// A group's ranks must divide the query heads evenly, and either divide the KV heads evenly or replicate each
// on the same number of ranks. The nearest legal choice keeps the number of ranks and has more groups.
Status check_heads(const ModelConfig& model, const RankLayout& layout) {
  const auto fits = [&](int64_t ranks) {
    // Latents form one KV head, which every rank has.
    const int64_t kv = model.mla.kv_lora_rank > 0 ? 1 : model.num_kv_heads;
    return model.num_heads % ranks == 0 && (kv % ranks == 0 || ranks % kv == 0);
  };
  const int64_t ranks = layout.attention_tp();
  if (fits(ranks)) return {};
  int64_t dp = layout.dp;
  while (layout.tp % dp != 0 || !fits(layout.tp / dp)) ++dp;  // ends at dp = tp: one rank per group
  return unsupported(
      "num_attention_heads=" + std::to_string(model.num_heads) +
      ", num_key_value_heads=" + std::to_string(model.num_kv_heads) + " cannot be split for attention TP " +
      std::to_string(ranks) + " (tp=" + std::to_string(layout.tp) + " / dp=" + std::to_string(layout.dp) +
      "), which must divide the query heads, and divide the KV heads or be a multiple of them; nearest "
      "legal choice: --dp " +
      std::to_string(dp) + " --enable-dp-attention");
}

}  // namespace

const char* quantization_name(const QuantConfig& quant) {
  switch (quant.method) {
    case QuantMethod::kNone:
      return "none";
    case QuantMethod::kMxfp4GptOss:
      return "mxfp4";
    case QuantMethod::kModelOptNvfp4:
      return "modelopt_fp4";
    case QuantMethod::kCompressedNvfp4:
    case QuantMethod::kCompressedMxfp4:
      return "compressed-tensors";
    case QuantMethod::kQuarkMxfp4:
      return "quark";
    case QuantMethod::kFp8Mxfp4:
      return "fp8";
  }
  return "unknown";
}

Result<ModelPlan> plan_model(const ModelConfig& model, const EngineConfig& given,
                             const std::optional<AbsentGpu>& absent_gpu) {
  ModelPlan plan;
  plan.absent_gpu = absent_gpu;
  FP4MOE_ASSIGN_OR_RETURN(const DeviceChoice device, choose_device(given.device, absent_gpu));
  FP4MOE_RETURN_IF_ERROR(check_gpu(device));
  EngineConfig all_given = given;
  take_device_defaults(given, device.kind, all_given);
  FP4MOE_RETURN_IF_ERROR(check_ranges(all_given));
  const Fp4Format format = expert_format(model.quant.method);
  FP4MOE_ASSIGN_OR_RETURN(ResolvedFlags resolved, resolve_flags(all_given, format, device.kind));
  for (const FlagNote& note : resolved.notes) log(note.level, note.text);
  plan.flags = std::move(resolved.flags);
  const EngineConfig& flags = plan.flags;
  FP4MOE_RETURN_IF_ERROR(check_quantization(model, flags.quantization));
  FP4MOE_RETURN_IF_ERROR(check_reduce_dtype(flags, device.kind));
  FP4MOE_ASSIGN_OR_RETURN(plan.act_dtype, resolve_dtype(flags.dtype));
  FP4MOE_ASSIGN_OR_RETURN(plan.kv_dtype, kv_dtype(flags, model.quant, plan.act_dtype));
  plan.isa = best_isa();
  if (flags.dense_quant == "q8") plan.dense_quant = DenseQuant::kQ8;
  if (flags.dense_quant == "fp8") plan.dense_quant = DenseQuant::kFp8;
  MoeProblem problem{
      .hidden_size = model.hidden_size,
      .intermediate_size = model.intermediate_size,
      .num_experts = model.num_experts,
      .top_k = model.top_k,
      .format = format,
      .activation = activation_of(model),
      .act_dtype = plan.act_dtype,
      .device = device.kind,
      .isa = plan.isa,
      .compute_capability = device.compute_capability,
  };
  const MoeChoice choice = moe_choice(flags);
  Result<MoePlan> moe = absent_gpu ? plan_moe(problem, choice) : plan_on_gpus(problem, choice);
  if (!moe.ok() && !absent_gpu && flags.device == "auto" && device.kind == DeviceKind::kCuda) {
    log_info("--device auto selects the CPU, because the GPU does not run this configuration (" +
             moe.status().message() + ")");
    problem.device = DeviceKind::kCpu;
    problem.compute_capability = 0;
    take_device_defaults(given, DeviceKind::kCpu, plan.flags);
    moe = plan_moe(problem, choice);
  }
  if (!moe.ok()) return moe.status();
  plan.moe = std::move(*moe);
  FP4MOE_RETURN_IF_ERROR(check_processes(flags, plan.moe));
  FP4MOE_ASSIGN_OR_RETURN(plan.placements, plan_placements(model, plan.moe, flags.init_expert_location));
  if (problem.device == DeviceKind::kCuda && flags.dp_size > 1 && !flags.enable_dp_lm_head &&
      plan.moe.spans_processes()) {
    plan.flags.enable_dp_lm_head = true;
    log_info(
        "--enable-dp-lm-head is implied: on GPUs of several processes each data-parallel group has its "
        "own LM head");
  }
  (problem.device == DeviceKind::kCpu ? note_graph_flags : note_determinism)(flags);
  FP4MOE_RETURN_IF_ERROR(check_attention(model, plan.moe.problem()));
  FP4MOE_RETURN_IF_ERROR(check_states(model, plan.moe.problem(), flags));
  return plan;
}

Status check_states(const ModelConfig& model, const MoeProblem& problem, const EngineConfig& flags) {
  const auto refuse = [](const std::string& what, const char* nearest) {
    return unsupported(what +
                       " does not support models with recurrent layers; nearest legal choice: " + nearest);
  };
  if (!model.has_state()) return {};
  if (const DeltaConfig& delta = model.delta;
      problem.device == DeviceKind::kCuda && delta.num_value_heads > kMaxDeltaCluster * delta.num_key_heads)
    return unsupported("--device cuda supports at most " + std::to_string(kMaxDeltaCluster) +
                       " value heads of a key head in recurrent layers, not " +
                       std::to_string(delta.num_value_heads / delta.num_key_heads) +
                       "; nearest legal choice: --device cpu");
  if (flags.speculative_algorithm != "none" && rows_per_request(flags) - 1 > kMaxReplayRows)
    return refuse("--speculative-num-draft-tokens " + std::to_string(rows_per_request(flags)),
                  ("--speculative-num-draft-tokens " + std::to_string(kMaxReplayRows + 1)).c_str());
  if (const int ranks = problem.layout.attention_tp(); model.delta.num_key_heads % ranks != 0)
    return unsupported("the " + std::to_string(model.delta.num_key_heads) +
                       " key heads of the recurrent layers cannot be shared by the " + std::to_string(ranks) +
                       " ranks of a group (--tp / --dp); legal: a divisor of " +
                       std::to_string(model.delta.num_key_heads));
  return {};
}

Status check_attention(const ModelConfig& model, const MoeProblem& problem) {
  FP4MOE_RETURN_IF_ERROR(check_head_dim(model, problem.device));
  return check_heads(model, problem.layout);
}

}  // namespace fp4moe
