#include "model/sglang_names.h"

#include <string>

namespace fp4moe {
namespace {

using Fate = SglangFlag::Fate;

constexpr Fate kMoot = Fate::kMoot, kRefused = Fate::kRefused, kSpeculative = Fate::kSpeculative;
constexpr const char* kNoGraphs =
    "configures CUDA graphs; here decode steps are padded to a captured size, and other steps are not "
    "captured";
constexpr const char* kPreemption =
    "configures preemption by more urgent requests; here running requests are never preempted";
constexpr const char* kOverlap =
    "overlaps experts and exchange; here the shared expert hides the exchange of counts, and rows are "
    "written directly to their destination";
constexpr const char* kParser =
    "selects the output parser; here the chat template and its tokens determine it";

constexpr SglangFlag kFlags[] = {
    {"--trust-remote-code", 0, kMoot, "runs a checkpoint's Python code, which never happens here"},
    {"--attention-backend", 1, kMoot, "chooses a GPU attention kernel; CPU ranks have only one"},
    {"--prefill-attention-backend", 1, kMoot, "chooses a GPU attention kernel; CPU ranks have only one"},
    {"--decode-attention-backend", 1, kMoot, "chooses a GPU attention kernel; CPU ranks have only one"},
    {"--sampling-backend", 1, kMoot, "chooses a GPU sampler; CPU ranks have only one"},
    {"--fp4-gemm-backend", 1, kMoot,
     "chooses a GPU kernel for dense FP4 layers; here the runner's kernel runs them"},
    {"--disable-cuda-graph-padding", 0, kMoot, kNoGraphs},
    {"--disable-piecewise-cuda-graph", 0, kMoot, kNoGraphs},
    {"--enable-torch-compile", 0, kMoot, "compiles PyTorch code; this engine has none"},
    {"--disable-custom-all-reduce", 0, kMoot, "configures GPU all-reduce kernels; CPU ranks use the fabric"},
    {"--disable-overlap-schedule", 0, kMoot,
     "configures whether CPU scheduling overlaps GPU work; here one step loop does both"},
    {"--schedule-policy", 1, kMoot, "orders waiting requests; here they are served in order of arrival"},
    {"--disable-priority-preemption", 0, kMoot, kPreemption},
    {"--priority-scheduling-preemption-threshold", 1, kMoot, kPreemption},
    {"--enable-return-routed-experts", 0, kMoot,
     "lets requests return their routed experts, which needs no flag here"},
    {"--dist-timeout", 1, kMoot,
     "is a timeout of torch.distributed; --comm-timeout limits waits between ranks"},
    {"--enable-metrics", 0, kMoot, "enables /metrics, which is always enabled here"},
    {"--enable-cache-report", 0, kMoot,
     "reports cached prompt tokens, which every response's usage does here"},
    {"--skip-server-warmup", 0, kMoot, "skips the warm-up request; none is sent here"},
    {"--log-level-http", 1, kMoot, "configures Python's HTTP server; use --log-level"},
    {"--disable-shared-experts-fusion", 0, kMoot,
     "keeps the shared expert separate from the routed ones; here its format and width decide"},
    {"--moe-dense-tp-size", 1, kMoot, "shards dense MLPs differently; results are the same"},
    {"--enable-single-batch-overlap", 0, kMoot, kOverlap},
    {"--enable-two-batch-overlap", 0, kMoot, kOverlap},
    {"--tbo-token-distribution-threshold", 1, kMoot, kOverlap},
    {"--deepep-config", 1, kMoot, "sets SM counts for DeepEP's normal mode; low_latency on CPUs uses no SMs"},
    {"--flashinfer-mxfp4-moe-precision", 1, kRefused, "its W4A8 kernel is --fp4-compute w4a8 here",
     "default|bf16|fp8", "default|bf16"},
    {"--eplb-algorithm", 1, kRefused, "there is one balancer here", nullptr, "auto"},
    {"--ep-dispatch-algorithm", 1, kMoot,
     "chooses between replicas of an expert; here a rank takes its own ones, or all in turn"},
    {"--eplb-rebalance-layers-per-chunk", 1, kRefused, "all layers are rebalanced between two steps"},
    {"--eplb-min-rebalancing-utilization-threshold", 1, kRefused,
     "a layer's experts move if the busiest rank's load falls by more than 1 %", nullptr, "1.0|1"},
    {"--expert-distribution-recorder-mode", 1, kMoot,
     "enables the counting of loads, which /expert_load always does here"},
    {"--expert-distribution-recorder-buffer-size", 1, kMoot,
     "limits the recorded passes; here loads are counted since the last move"},
    {"--pipeline-parallel-size,--pp-size,--pp", 1, kRefused,
     "pipeline parallelism is not supported; use --tp", nullptr, "1"},
    {"--nnodes", 1, kRefused, "start several nodes with mpirun or srun and --fabric mpi", nullptr, "1"},
    {"--node-rank", 1, kRefused, "start several nodes with mpirun or srun and --fabric mpi", nullptr, "0"},
    {"--dist-init-addr,--nccl-init-addr", 1, kMoot,
     "is the rendezvous address of torch.distributed; ranks here need none"},
    {"--quantization-param-path", 1, kRefused, "scales come from the checkpoint; leave the flag out"},
    {"--json-model-override-args", 1, kRefused, "edit the checkpoint's config.json instead", nullptr, "{}"},
    {"--is-embedding", 0, kRefused, "embedding models are not served"},
    {"--enable-lora", 0, kRefused, "LoRA adapters are not supported yet"},
    {"--lora-paths", -1, kRefused, "LoRA adapters are not supported yet"},
    {"--reasoning-parser", 1, kMoot, kParser},
    {"--tool-call-parser", 1, kMoot, kParser},
    {"--constrained-json-disable-any-whitespace", 0, kMoot,
     "removes optional whitespace from JSON, as this engine always does"},
    {"--disaggregation-transfer-backend", 1, kMoot, "names an RDMA library; KV pages travel over TCP"},
    {"--disaggregation-ib-device", 1, kRefused, "names an RDMA device; KV pages travel over TCP"},
    {"--speculative-attention-mode", 1, kSpeculative},
    {"--speculative-moe-runner-backend", 1, kSpeculative},
    {"--speculative-moe-a2a-backend", 1, kSpeculative},
    {"--speculative-token-map", 1, kSpeculative},
    {"--speculative-draft-model-revision", 1, kSpeculative},
    {"--speculative-draft-attention-backend", 1, kSpeculative},
    {"--speculative-draft-model-quantization", 1, kSpeculative},
    {"--speculative-accept-threshold-single", 1, kSpeculative, nullptr, nullptr, "1|1.0"},
    {"--speculative-accept-threshold-acc", 1, kSpeculative, nullptr, nullptr, "1|1.0"},
    {"--speculative-use-rejection-sampling", 0, kSpeculative},
    {"--speculative-adaptive-config", 1, kSpeculative},
    {"--speculative-ngram-min-bfs-breadth", 1, kSpeculative, nullptr, nullptr, "1"},
    {"--speculative-ngram-max-bfs-breadth", 1, kSpeculative, nullptr, nullptr, "1"},
    {"--speculative-ngram-match-type", 1, kSpeculative},
    {"--speculative-ngram-max-trie-depth", 1, kSpeculative},
    {"--speculative-ngram-branch-length", 1, kSpeculative},
    {"--speculative-ngram-capacity", 1, kSpeculative},
};

constexpr const char* kNativeRunner = "is a kernel library that this engine does not call";
constexpr SglangName kRunners[] = {
    {"triton", kNativeRunner, "--moe-runner-backend triton_kernel (MXFP4), marlin or auto"},
    {"deep_gemm", "runs FP8 experts, or FP4 ones on Blackwell", "--moe-runner-backend marlin or auto"},
    {"cutlass", "is for FP8 experts", "--moe-runner-backend flashinfer_cutlass"},
    {"flashinfer_trtllm_routed", "has no separate runner here", "--moe-runner-backend flashinfer_trtllm"},
    {"experimental_sgl_trtllm", kNativeRunner, "--moe-runner-backend flashinfer_trtllm"},
    {"experimental_sgl_marlin", kNativeRunner, "--moe-runner-backend marlin"},
    {"humming", kNativeRunner, "--moe-runner-backend marlin"},
    {"aiter", "runs on AMD GPUs only", "--moe-runner-backend auto"},
    {"hpc_ops", kNativeRunner, "--moe-runner-backend auto"},
    {"megamoe", "runs on Blackwell only", "--moe-runner-backend auto"},
};

constexpr const char* kDeepep = "--moe-a2a-backend deepep";
constexpr SglangName kA2a[] = {
    {"mooncake", "is a transport that this engine does not link", kDeepep},
    {"nixl", "is a transport that this engine does not link", kDeepep},
    {"mori", "runs on AMD GPUs only", kDeepep},
    {"ascend_fuseep", "runs on Ascend NPUs only", kDeepep},
    {"megamoe", "runs on Blackwell only", kDeepep},
    {"pplx", "is a transport that this engine does not link", kDeepep},
};

constexpr const char* kAuto = "--quantization auto";
constexpr const char* kNoFp4 = "is not an FP4 format; this engine runs FP4 experts only";
constexpr SglangName kQuantizations[] = {
    {"fp8", kNoFp4, kAuto},
    {"mxfp8", kNoFp4, kAuto},
    {"awq", kNoFp4, kAuto},
    {"awq_marlin", kNoFp4, kAuto},
    {"gptq", kNoFp4, kAuto},
    {"gptq_marlin", kNoFp4, kAuto},
    {"gguf", kNoFp4, kAuto},
    {"bitsandbytes", kNoFp4, kAuto},
    {"w8a8_int8", kNoFp4, kAuto},
    {"w8a8_fp8", kNoFp4, kAuto},
    {"modelopt_fp8", kNoFp4, kAuto},
    {"moe_wna16", kNoFp4, kAuto},
    {"w4afp8", kNoFp4, kAuto},
    {"petit_nvfp4", kNoFp4, kAuto},
    {"quark", kNoFp4, kAuto},
    {"nvfp4_online", "quantises a bf16 checkpoint while it loads, which this engine does not", kAuto},
};

constexpr const char* kEnvironment[] = {
    "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_CUTEDSL_MOE_NVFP4_DISPATCH",
    "SGLANG_DEEPEP_BF16_DISPATCH",
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
    "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION",
};

// Whether `word` is one of "a|b|c".
bool among(const char* words, std::string_view word) {
  if (words == nullptr) return false;
  for (std::string_view rest = words; !rest.empty();) {
    const size_t end = std::min(rest.find('|'), rest.size());
    if (rest.substr(0, end) == word) return true;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return false;
}

std::string words(const char* list) {
  std::string text;
  for (const char* c = list; *c != 0; ++c) text += *c == '|' ? std::string(", ") : std::string(1, *c);
  return text;
}

}  // namespace

std::span<const SglangFlag> sglang_flags() { return kFlags; }
std::span<const SglangName> sglang_runners() { return kRunners; }
std::span<const SglangName> sglang_a2a() { return kA2a; }
std::span<const SglangName> sglang_quantizations() { return kQuantizations; }
std::span<const char* const> sglang_environment() { return kEnvironment; }

Result<std::string> judge_sglang_flag(std::string_view name, std::string_view value) {
  const std::string given = std::string(name) + (value.empty() ? "" : " " + std::string(value));
  for (const SglangFlag& flag : kFlags) {
    const std::string_view first =
        std::string_view(flag.names).substr(0, std::string_view(flag.names).find(','));
    if (first != name) continue;
    if (among(flag.harmless, value)) return std::string();
    if (flag.fate == Fate::kSpeculative)
      return unsupported(given +
                         ": a draft of --speculative-algorithm is one chain of tokens, of which those are "
                         "kept that sampling "
                         "chooses anyway; this setting does not apply to it; leave it out");
    if (flag.legal != nullptr && !among(flag.legal, value))
      return invalid_argument(given + " is unknown; use one of " + words(flag.harmless));
    if (flag.fate == Fate::kMoot) return given + " is ignored: it " + flag.text;
    return unsupported(given + ": " + flag.text +
                       (flag.harmless == nullptr ? "" : "; accepted values: " + words(flag.harmless)));
  }
  return invalid_argument("unknown flag " + given);
}

Status check_sglang_name(std::span<const SglangName> names, const char* flag, std::string_view name) {
  for (const SglangName& known : names)
    if (name == known.name)
      return unsupported(std::string(flag) + "=" + known.name + " " + known.reason +
                         "; nearest legal choice: " + known.nearest);
  return {};
}

}  // namespace fp4moe
