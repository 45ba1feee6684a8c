#include "model/resolve_flags.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "base/check.h"
#include "model/sglang_names.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

class Resolver {
 public:
  Resolver(const EngineConfig& flags, Fp4Format format, DeviceKind device)
      : format_(format), device_(device), given_(flags) {
    out_.flags = flags;
    out_.flags.sglang_flags.clear();
    out_.flags.environment.clear();
  }

  Result<ResolvedFlags> run() {
    FP4MOE_RETURN_IF_ERROR(judge_sglang_flags());
    FP4MOE_RETURN_IF_ERROR(check_words());
    FP4MOE_RETURN_IF_ERROR(check_speculation());
    FP4MOE_RETURN_IF_ERROR(resolve_act_scales());
    resolve_parallelism();
    FP4MOE_RETURN_IF_ERROR(resolve_deepep());
    FP4MOE_RETURN_IF_ERROR(resolve_flashinfer());
    FP4MOE_RETURN_IF_ERROR(check_capacity());
    return std::move(out_);
  }

 private:
  EngineConfig& flags() { return out_.flags; }
  void note(std::string text) { out_.notes.push_back({LogLevel::kInfo, std::move(text)}); }
  void warn(std::string text) { out_.notes.push_back({LogLevel::kWarning, std::move(text)}); }

  // Returns null if the variable is not set.
  const std::string* env(std::string_view name) const {
    for (const NamedValue& variable : given_.environment)
      if (variable.name == name) return &variable.value;
    return nullptr;
  }
  Result<std::optional<bool>> env_switch(const std::string& name) const {
    const std::string* value = env(name);
    if (value == nullptr || value->empty()) return std::optional<bool>();
    for (const char* on : {"1", "true", "True", "yes"})
      if (*value == on) return std::optional<bool>(true);
    for (const char* off : {"0", "false", "False", "no"})
      if (*value == off) return std::optional<bool>(false);
    return invalid_argument("environment variable " + name + "=" + *value + " must be 0 or 1");
  }

  // Predicts plan_moe()'s choice; plan_moe() itself refuses contradicting flags.
  bool computes_w4a4() const {
    if (format_ != Fp4Format::kNvfp4) return false;
    if (given_.fp4_compute != "auto") return given_.fp4_compute == scheme_name(Scheme::kW4A4);
    for (const RunnerAlias& alias : runner_aliases())
      if (given_.moe_runner_backend == alias.name) return alias.packed.scheme == Scheme::kW4A4;
    return false;
  }

  Status judge_sglang_flags() {
    for (const NamedValue& flag : given_.sglang_flags) {
      FP4MOE_ASSIGN_OR_RETURN(std::string text, judge_sglang_flag(flag.name, flag.value));
      if (!text.empty()) note(std::move(text));
    }
    return {};
  }

  Status check_words() {
    for (const std::string& name : given_.served_model_name)
      if (name.empty()) return invalid_argument("--served-model-name is empty; legal: any other text");
    FP4MOE_RETURN_IF_ERROR(
        check_sglang_name(sglang_runners(), "moe_runner_backend", given_.moe_runner_backend));
    FP4MOE_RETURN_IF_ERROR(check_sglang_name(sglang_a2a(), "moe_a2a_backend", given_.moe_a2a_backend));
    FP4MOE_RETURN_IF_ERROR(check_sglang_name(sglang_quantizations(), "quantization", given_.quantization));
    FP4MOE_RETURN_IF_ERROR(
        check_word("--load-format", given_.load_format, {"auto", "safetensors", "dummy"},
                   {"pt", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral", "layered",
                    "flash_rl", "fastsafetensors", "remote", "remote_instance"}));
    FP4MOE_RETURN_IF_ERROR(check_word("--dense-quant", given_.dense_quant, {"none", "q8", "fp8"}));
    FP4MOE_RETURN_IF_ERROR(
        check_word("--fp4-act-scales", given_.fp4_act_scales, {"auto", "static", "per_token"}));
    FP4MOE_RETURN_IF_ERROR(
        check_word("--deepep-mode", given_.deepep_mode, {"auto", "low_latency", "normal"}));
    FP4MOE_RETURN_IF_ERROR(check_word("--deepep-dispatcher-output-dtype",
                                      given_.deepep_dispatcher_output_dtype, {"auto", "bf16", "fp8", "nvfp4"},
                                      {"int8"}));
    FP4MOE_RETURN_IF_ERROR(check_word("--flashinfer-dispatcher-output-dtype",
                                      given_.flashinfer_dispatcher_output_dtype, {"auto", "bf16", "nvfp4"},
                                      {"fp8"}));
    FP4MOE_RETURN_IF_ERROR(
        check_word("--flashinfer-combine-dtype", given_.flashinfer_combine_dtype, {"auto", "bf16", "fp8"}));
    FP4MOE_RETURN_IF_ERROR(check_word("--tp-reduce-dtype", given_.tp_reduce_dtype, {"float32", "bfloat16"}));
    FP4MOE_RETURN_IF_ERROR(check_word("--grammar-backend", given_.grammar_backend,
                                      {"auto", "xgrammar", "none"}, {"outlines", "llguidance"}));
    FP4MOE_RETURN_IF_ERROR(
        check_word("--disaggregation-mode", given_.disaggregation_mode, {"null", "prefill", "decode"}));
    FP4MOE_RETURN_IF_ERROR(check_word("--self-test", given_.self_test, {"fast", "full", "off"}));
    return check_word("--kv-cache-dtype", given_.kv_cache_dtype, {"auto", "bfloat16", "bf16", "fp8_e4m3"},
                      {"fp8_e5m2", "fp4_e2m1"});
  }

  // `foreign`: values that SGLang knows and this engine does not support.
  static Status check_word(const char* flag, const std::string& value,
                           std::initializer_list<const char*> legal,
                           std::initializer_list<const char*> foreign = {}) {
    std::string list;
    for (const char* word : legal) {
      if (value == word) return {};
      list += (list.empty() ? "" : ", ") + std::string(word);
    }
    const std::string message = std::string(flag) + " " + value;
    for (const char* word : foreign)
      if (value == word)
        return unsupported(message + " is not supported here; nearest legal choice: " + flag +
                           " auto (allowed: " + list + ")");
    return invalid_argument(message + " is unknown; use one of " + list);
  }

  Status check_speculation() {
    const std::string& algorithm = given_.speculative_algorithm;
    const std::string given = "--speculative-algorithm " + algorithm;
    for (const char* known : {"DFLASH", "DSPARK"})
      if (algorithm == known)
        return unsupported(given +
                           " drafts a block of tokens at a time, which this engine does not; nearest legal "
                           "choice: --speculative-algorithm NGRAM");
    FP4MOE_RETURN_IF_ERROR(check_word("--speculative-algorithm", algorithm,
                                      {"none", "NGRAM", "EAGLE", "NEXTN", "EAGLE3", "STANDALONE"}));
    FP4MOE_RETURN_IF_ERROR(check_draft_path());
    if (given_.speculative_eagle_topk < 0 || given_.speculative_eagle_topk > 1)
      return unsupported("--speculative-eagle-topk " + std::to_string(given_.speculative_eagle_topk) +
                         " drafts a tree; here a draft is a chain: --speculative-eagle-topk 1");
    if (algorithm == "none") {
      note_unused_drafts();
      return {};
    }
    const std::string& mode = given_.disaggregation_mode;
    const bool takes_features = algorithm != "NGRAM" && algorithm != "STANDALONE";
    if (mode == "prefill" && !takes_features) {
      note(given + " has no effect on a prefill engine, which does not decode");
      flags().speculative_algorithm = "none";
      flags().speculative_draft_model_path.clear();
      return {};
    }
    return resolve_draft_steps();
  }

  Status check_draft_path() {
    const std::string& algorithm = given_.speculative_algorithm;
    const bool needs_path = algorithm == "STANDALONE" || algorithm == "EAGLE3";
    const std::string& path = given_.speculative_draft_model_path;
    if (needs_path && path.empty())
      return invalid_argument("--speculative-algorithm " + algorithm +
                              " needs the folder of a draft model: --speculative-draft-model-path DIR");
    if (!needs_path && !path.empty())
      return unsupported("--speculative-draft-model-path " + path +
                         " has no effect with --speculative-algorithm " + algorithm +
                         "; it is for STANDALONE and EAGLE3");
    return {};
  }

  // As in SGLang, the number of steps determines the number of rows of a chain.
  Status resolve_draft_steps() {
    const int steps = given_.speculative_num_steps;
    if (steps == 0) return {};
    const std::string given = "--speculative-num-steps " + std::to_string(steps);
    if (given_.speculative_algorithm == "NGRAM")
      return unsupported(given + " is for draft models; with --speculative-algorithm NGRAM use " +
                         "--speculative-num-draft-tokens " + std::to_string(steps + 1));
    int& num_rows = flags().speculative_num_draft_tokens;
    if (num_rows != steps + 1)
      warn("--speculative-num-draft-tokens " + std::to_string(num_rows) + " is " + std::to_string(steps + 1) +
           ": " + given + " drafts one token a step, and the last token needs a row too");
    num_rows = steps + 1;
    return {};
  }

  void note_unused_drafts() {
    const EngineConfig defaults;
    if (given_.speculative_num_draft_tokens != defaults.speculative_num_draft_tokens ||
        given_.speculative_num_steps != defaults.speculative_num_steps ||
        given_.speculative_eagle_topk != defaults.speculative_eagle_topk ||
        given_.speculative_ngram_min_match_window_size != defaults.speculative_ngram_min_match_window_size ||
        given_.speculative_ngram_max_match_window_size != defaults.speculative_ngram_max_match_window_size ||
        given_.speculative_adaptive)
      note(
          "--speculative-num-draft-tokens, --speculative-num-steps, --speculative-eagle-topk, "
          "--speculative-adaptive and the match window sizes are ignored without --speculative-algorithm");
  }

  Status resolve_act_scales() {
    const std::string name = "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION";
    FP4MOE_ASSIGN_OR_RETURN(const std::optional<bool> per_token, env_switch(name));
    if (!per_token.value_or(false) || given_.fp4_act_scales != "auto") return {};
    if (!computes_w4a4()) {
      warn(name + "=1 is ignored: activations are quantised only under w4a4");
      return {};
    }
    flags().fp4_act_scales = "per_token";
    note("--fp4-act-scales auto is per_token: " + name + "=1");
    return {};
  }

  void resolve_parallelism() {
    EngineConfig& f = flags();
    const std::string tp = std::to_string(f.tp_size);
    if (f.moe_a2a_backend != "none" && f.ep_size == 1 && f.tp_size > 1) {
      f.ep_size = f.tp_size;
      note("--ep-size 1 is raised to --tp-size " + tp + ": --moe-a2a-backend " + f.moe_a2a_backend +
           " moves rows to whole experts");
    }
    if (f.enable_deterministic_inference && f.ep_size == 1 && f.tp_size > 1) {
      f.ep_size = f.tp_size;
      note("--ep-size 1 is raised to --tp-size " + tp +
           ": --enable-deterministic-inference adds no partial sums of an expert's shards");
    }
    if (f.enable_dp_attention && f.dp_size > 1)
      note(
          "--max-running-requests, --chunked-prefill-size and --max-prefill-tokens are divided evenly "
          "among " +
          std::to_string(f.dp_size) + " data-parallel groups");
  }

  // Returns the variable's value under either name; the old name counts only if the new one is not set.
  Result<std::optional<bool>> nvfp4_dispatch() {
    const std::string name = "SGLANG_MOE_NVFP4_DISPATCH", old_name = "SGLANG_CUTEDSL_MOE_NVFP4_DISPATCH";
    FP4MOE_ASSIGN_OR_RETURN(const std::optional<bool> value, env_switch(name));
    if (value.has_value()) return value;
    FP4MOE_ASSIGN_OR_RETURN(const std::optional<bool> old_value, env_switch(old_name));
    if (old_value.has_value()) warn(old_name + " is the old name of " + name);
    return old_value;
  }

  // Precedence of the dispatch type: the flag, the bf16 variable, the NVFP4 variable, bf16.
  Status resolve_deepep() {
    EngineConfig& f = flags();
    if (f.moe_a2a_backend != "deepep") {
      if (f.deepep_mode != "auto")
        warn("--deepep-mode " + f.deepep_mode + " is ignored: --moe-a2a-backend is " + f.moe_a2a_backend);
      f.deepep_mode = "auto";
      return {};
    }
    if (f.deepep_mode == "normal")
      return unsupported(
          "--deepep-mode normal: only DeepEP low_latency dispatch (masked layout) runs here; nearest legal "
          "choice: --deepep-mode low_latency");
    if (f.deepep_mode == "auto") {
      f.deepep_mode = "low_latency";
      note("--deepep-mode auto is low_latency, also for prompts: long prompts are sent in chunks");
    }
    std::string& dtype = f.deepep_dispatcher_output_dtype;
    if (dtype != "auto") return {};
    FP4MOE_ASSIGN_OR_RETURN(const std::optional<bool> bf16, env_switch("SGLANG_DEEPEP_BF16_DISPATCH"));
    FP4MOE_ASSIGN_OR_RETURN(const std::optional<bool> nvfp4, nvfp4_dispatch());
    dtype = "bf16";
    std::string why = "the default";
    if (bf16.value_or(false)) {
      why = "SGLANG_DEEPEP_BF16_DISPATCH=1";
    } else if (nvfp4.value_or(false)) {
      if (computes_w4a4()) {
        dtype = "nvfp4";
        why = "SGLANG_MOE_NVFP4_DISPATCH=1";
      } else {
        warn_nvfp4_ignored();
      }
    }
    note("--deepep-dispatcher-output-dtype auto selects " + dtype + ": " + why);
    return {};
  }

  // As in SGLang, w4a4 sends NVFP4 rows, because its quantiser would produce the same values anyway; between
  // GPUs only on request, because NVLink moves bf16 rows in less time than it takes to encode them.
  Status resolve_flashinfer() {
    EngineConfig& f = flags();
    if (f.moe_a2a_backend != "flashinfer") return {};
    if (f.flashinfer_combine_dtype == "auto") f.flashinfer_combine_dtype = "bf16";
    std::string& dtype = f.flashinfer_dispatcher_output_dtype;
    if (dtype != "auto") return {};
    FP4MOE_ASSIGN_OR_RETURN(const std::optional<bool> nvfp4, nvfp4_dispatch());
    if (nvfp4.value_or(false) && !computes_w4a4()) warn_nvfp4_ignored();
    const bool is_gpu = device_ == DeviceKind::kCuda;
    dtype = computes_w4a4() && nvfp4.value_or(!is_gpu) ? "nvfp4" : "bf16";
    std::string why = "activations are not NVFP4";
    if (computes_w4a4())
      why = nvfp4.has_value() ? std::string("SGLANG_MOE_NVFP4_DISPATCH=") + (*nvfp4 ? "1" : "0")
            : is_gpu          ? "faster between GPUs than NVFP4 (SGLANG_MOE_NVFP4_DISPATCH=1 for NVFP4)"
                              : "w4a4 quantises the rows anyway (SGLANG_MOE_NVFP4_DISPATCH=0 for bf16)";
    note("--flashinfer-dispatcher-output-dtype auto selects " + dtype + ": " + why);
    return {};
  }

  void warn_nvfp4_ignored() {
    warn(
        "SGLANG_MOE_NVFP4_DISPATCH=1 is ignored: rows are sent as NVFP4 only under w4a4, on an NVFP4 "
        "checkpoint");
  }

  // SGLang sizes its buffers by these variables and fails if a batch exceeds them; here a value that is too
  // small only causes a warning.
  Status check_capacity() {
    const std::string a2a = given_.moe_a2a_backend;
    if (a2a != "deepep" && a2a != "flashinfer") return {};
    const std::string name = a2a == "deepep" ? "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
                                             : "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK";
    const std::string* text = env(name);
    if (text == nullptr || text->empty()) return {};
    int64_t cap = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), cap);
    const int64_t most = a2a == "deepep" ? 1024 : 1 << 20;
    if (error != std::errc() || end != text->data() + text->size() || cap < 1 || cap > most)
      return invalid_argument("environment variable " + name + "=" + *text + " must be between 1 and " +
                              std::to_string(most));
    const int64_t required = dispatch_tokens_per_rank(flags());
    if (cap < required)
      warn(name + "=" + *text + " is below the " + std::to_string(required) +
           " tokens that a rank can dispatch in a step, (max_prefill_tokens + max_running_requests) / tp, "
           "rounded up; rows that do not fit in --a2a-memory-budget " +
           std::to_string(given_.a2a_memory_budget) + " bytes are sent in chunks");
    return {};
  }

  Fp4Format format_;
  const DeviceKind device_;
  const EngineConfig& given_;
  ResolvedFlags out_;
};

}  // namespace

int64_t rows_per_request(const EngineConfig& flags) {
  return flags.speculative_algorithm == "none" ? 1 : flags.speculative_num_draft_tokens;
}

int64_t dispatch_tokens_per_rank(const EngineConfig& flags) {
  const auto part = [](int64_t n, int64_t parts) { return (n + parts - 1) / parts; };
  const int64_t dp = std::max(1, flags.dp_size), ranks = std::max<int64_t>(1, flags.tp_size / dp);
  const int64_t num_decode_rows = part(flags.max_running_requests, dp) * rows_per_request(flags);
  return part(part(flags.max_prefill_tokens, dp) + num_decode_rows, ranks);
}

Result<ResolvedFlags> resolve_flags(const EngineConfig& flags, Fp4Format format, DeviceKind device) {
  return Resolver(flags, format, device).run();
}

}  // namespace fp4moe
