#include "peer_flags.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace fp4moe {

namespace {

constexpr const char* kOneDevice = "all layers run on one kind of device";
constexpr const char* kTls = "TLS is the task of a proxy, such as packaging/proxy/Caddyfile";
constexpr const char* kTemplate = "no flag is needed: the chat template determines the syntax of tool calls";

constexpr PeerFlag kPeerFlags[] = {
    // vLLM
    {"--gpu-memory-utilization", "--mem-fraction-static", ""},
    {"--max-num-seqs", "--max-running-requests", ""},
    {"--max-num-batched-tokens", "--max-prefill-tokens", ""},
    {"--long-prefill-token-threshold", "--chunked-prefill-size", ""},
    {"--enable-expert-parallel", "--ep-size", "equal to --tp-size: each rank has whole experts"},
    {"-tp", "--tp-size", ""},
    {"-dp", "--dp-size", ""},
    {"-ep", "--ep-size", ""},
    {"-pp", "--tp-size", "pipeline parallelism is not supported"},
    {"--enable-prefix-caching", nullptr,
     "no flag is needed: prefixes are cached unless --disable-radix-cache is given"},
    {"--no-enable-prefix-caching", "--disable-radix-cache", ""},
    {"--enable-chunked-prefill", "--chunked-prefill-size", "prompts are always computed in chunks"},
    {"--no-enable-chunked-prefill", "--chunked-prefill-size", "prompts are always computed in chunks"},
    {"--swap-space", nullptr,
     "no flag is needed: a request that loses its KV pages is computed again, so no memory is used for "
     "swapping"},
    {"--cpu-offload-gb", "--device cpu", kOneDevice},
    {"--block-size", "--page-size", ""},
    {"--num-gpu-blocks-override,--kv-cache-memory-bytes", "--max-total-tokens", "in tokens"},
    {"--enforce-eager", "--disable-cuda-graph", ""},
    {"--cuda-graph-sizes,--cudagraph-capture-sizes", "--cuda-graph-bs", ""},
    {"--max-cudagraph-capture-size", "--cuda-graph-max-bs", ""},
    {"--tokenizer", "--tokenizer-path", ""},
    {"--distributed-executor-backend", "--fabric", ""},
    {"--all2all-backend", "--moe-a2a-backend", ""},
    {"--moe-backend", "--moe-runner-backend", ""},
    {"--scheduling-policy", "--enable-priority-scheduling", ""},
    {"--async-scheduling", nullptr, "no flag is needed: one step loop schedules and launches"},
    {"--guided-decoding-backend,--structured-outputs-config", "--grammar-backend", ""},
    {"--speculative-config", "--speculative-algorithm", ""},
    {"--hf-overrides,--hf-config-path", nullptr, "edit the checkpoint's config.json instead"},
    {"--enable-auto-tool-choice,--tool-parser-plugin", nullptr, kTemplate},
    {"--enable-log-requests", "--log-requests", ""},
    {"--disable-log-requests,--no-enable-log-requests", nullptr,
     "no flag is needed: requests are logged only with --log-requests"},
    {"--disable-log-stats", "--decode-log-interval 0", ""},
    {"--max-log-len", "--log-requests-level", ""},
    {"--uvicorn-log-level", "--log-level", ""},
    {"--uds", "--host unix:/path", ""},
    {"--ssl-keyfile,--ssl-certfile,--ssl-ca-certs", nullptr, kTls},
    // llama.cpp
    {"-m", "--model-path", "or name the checkpoint folder without a flag"},
    {"-c,--ctx-size", "--context-length", ""},
    {"-ngl,--gpu-layers,--n-gpu-layers", "--device cuda", "all layers run on the GPU"},
    {"-np,--parallel", "--max-running-requests", ""},
    {"-t", "--threads", ""},
    {"-tb,--threads-batch", "--threads", "for prompts and outputs"},
    {"-fa,--flash-attn", nullptr, "no flag is needed: the engine chooses its attention kernels"},
    {"--jinja,--no-jinja", nullptr, "no flag is needed: chat templates are Jinja templates"},
    {"--chat-template-file", "--chat-template", ""},
    {"-cb,--cont-batching", nullptr, "no flag is needed: requests are always batched continuously"},
    {"-b,--batch-size", "--max-prefill-tokens", ""},
    {"-ub,--ubatch-size", "--chunked-prefill-size", ""},
    {"-ctk,--cache-type-k,-ctv,--cache-type-v", "--kv-cache-dtype", ""},
    {"-sm,--split-mode,-ts,--tensor-split", "--tp-size", ""},
    {"-mg,--main-gpu", nullptr, "set the environment variable CUDA_VISIBLE_DEVICES"},
    {"--cpu-moe,-cmoe,--n-cpu-moe,-ncmoe,-ot,--override-tensor", "--device cpu", kOneDevice},
    {"--mmap,--no-mmap,--mlock", "--weight-cache-dir", "CPU: packed weights are mapped from this folder"},
    {"-a,--alias", "--served-model-name", ""},
    {"--metrics", nullptr, "no flag is needed: the server always has /metrics"},
    {"--slots,--props", nullptr, "no flag is needed: the server has /server_info and /metrics"},
    {"--embedding,--embeddings", nullptr, "embedding models are not served"},
    {"--lora,--lora-scaled", nullptr, "LoRA adapters are not supported yet"},
    {"--ssl-key-file,--ssl-cert-file", nullptr, kTls},
    // Sampling, which run has as flags and which requests set in serve.
    {"-s", "--seed", ""},
    {"-s,--seed", "--random-seed", ""},
    {"--temp", "--temperature", ""},
    {"--temp,--temperature", nullptr, "each request sets \"temperature\""},
    {"--predict,--n-predict", "--max-tokens", ""},
    {"-n,--predict,--n-predict,--max-tokens", nullptr, "each request sets \"max_tokens\""},
    {"-sys,--system-prompt", "--system", ""},
    {"-f,--file", "--prompt", "or send the file to stdin"},
    {"-i,--interactive,-cnv,--conversation", nullptr,
     "no flag is needed: `fp4moe run MODEL` without --prompt is a chat"},
    {"-st,--single-turn", "--prompt", ""},
};

// Names that other engines give to a subcommand.
constexpr std::pair<std::string_view, const char*> kPeerSubcommands[] = {
    {"chat", "run"},    {"cli", "run"},      {"complete", "run"},        {"generate", "run"},
    {"start", "serve"}, {"launch", "serve"}, {"launch_server", "serve"}, {"benchmark", "bench"},
};

bool has_name(const PeerFlag& flag, std::string_view name) {
  for (std::string_view rest = flag.names; !rest.empty();) {
    const size_t end = std::min(rest.find(','), rest.size());
    if (rest.substr(0, end) == name) return true;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return false;
}

// "--max_num_seqs=4" -> "--max-num-seqs"
std::string table_name(const std::string& name) {
  std::string out = name.substr(0, name.find('='));
  std::replace(out.begin(), out.end(), '_', '-');
  return out;
}

}  // namespace

std::span<const PeerFlag> peer_flags() { return kPeerFlags; }

bool is_peer_flag(const std::string& name) {
  const std::string wanted = table_name(name);
  return std::any_of(std::begin(kPeerFlags), std::end(kPeerFlags),
                     [&](const PeerFlag& flag) { return has_name(flag, wanted); });
}

std::string peer_flag_hint(const std::string& name, const std::vector<std::string>& known) {
  const auto has = [&known](const std::string& flag) {
    return std::find(known.begin(), known.end(), flag.substr(0, flag.find(' '))) != known.end();
  };
  if (!has("--tp-size")) return "";
  const std::string wanted = table_name(name);
  for (const PeerFlag& flag : kPeerFlags) {
    if (!has_name(flag, wanted)) continue;
    if (flag.ours == nullptr) return flag.note;
    if (!has(flag.ours)) continue;
    return std::string("use ") + flag.ours + (*flag.note == 0 ? "" : std::string(" (") + flag.note + ")");
  }
  return "";
}

std::string peer_subcommand(const std::string& name) {
  for (const auto& [theirs, ours] : kPeerSubcommands)
    if (name == theirs) return ours;
  return "";
}

}  // namespace fp4moe
