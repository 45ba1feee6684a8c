#include <cstdio>
#include <string>

#include "verb.h"

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
    default:
      return 1;
  }
}

void add_engine_flags(CLI::App& verb, EngineConfig& c) {
  // Every flag is also an environment variable: FP4MOE_ and the flag in capitals.
  const auto flag = [&verb](const std::string& names, auto& value, const std::string& help) {
    CLI::Option* option = verb.add_option(names, value, help)->capture_default_str();
    const size_t first = names.find("--");
    std::string env = "FP4MOE_";
    for (const char ch : names.substr(first + 2, names.find(',', first) - first - 2))
      env += ch == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(ch)));
    option->envname(env);
    return option;
  };
  flag("model,--model-path,--model", c.model_path, "folder of the checkpoint")->required();
  flag("--tokenizer-path", c.tokenizer_path, "folder or tokenizer.json, if not the checkpoint's");
  flag("--chat-template", c.chat_template, "file with a Jinja chat template, if not the checkpoint's");
  flag("--served-model-name", c.served_model_name, "name in /v1/models; default: the folder's name");
  flag("--quantization", c.quantization, "auto, mxfp4 or modelopt_fp4; must agree with the checkpoint");
  flag("--dtype", c.dtype, "activations: auto (bfloat16), bfloat16 or float32");
  flag("--context-length,--max-model-len", c.context_length, "most tokens of a request; 0: the model's");

  flag("--device", c.device, "auto, cpu or cuda")->group("Execution");
  flag("--threads", c.threads, "CPU threads; 0: all cores")->group("Execution");
  flag("--moe-runner-backend", c.moe_runner_backend, "see `fp4moe backends`")->group("Execution");
  flag("--moe-a2a-backend", c.moe_a2a_backend, "none, deepep or flashinfer")->group("Execution");
  flag("--fp4-compute", c.fp4_compute, "auto, w4a16, w4a4 or w4a8")->group("Execution");
  flag("--fabric", c.fabric, "auto, local, threads or mpi")->group("Execution");
  flag("--tp-size,--tp,--tensor-parallel-size", c.tp_size, "tensor-parallel ranks")->group("Execution");
  flag("--ep-size,--ep,--expert-parallel-size", c.ep_size, "expert-parallel ranks")->group("Execution");
  flag("--dp-size,--dp,--data-parallel-size", c.dp_size, "data-parallel ranks")->group("Execution");
  verb.add_flag("--enable-dp-attention", c.enable_dp_attention, "data-parallel attention")
      ->envname("FP4MOE_ENABLE_DP_ATTENTION")
      ->group("Execution");

  flag("--max-total-tokens", c.max_total_tokens, "tokens in the KV pool; 0: from --mem-fraction-static")
      ->group("Memory and scheduling");
  flag("--mem-fraction-static", c.mem_fraction_static, "share of free memory for weights and KV pool")
      ->group("Memory and scheduling");
  flag("--page-size", c.page_size, "tokens in a KV page")->group("Memory and scheduling");
  flag("--max-running-requests", c.max_running_requests, "requests in one batch")
      ->group("Memory and scheduling");
  flag("--max-queued-requests", c.max_queued_requests, "requests that wait; more get 503")
      ->group("Memory and scheduling");
  flag("--chunked-prefill-size", c.chunked_prefill_size, "most prompt tokens of a request in a step")
      ->group("Memory and scheduling");
  flag("--max-prefill-tokens", c.max_prefill_tokens, "most prompt tokens in a step")
      ->group("Memory and scheduling");
  flag("--random-seed", c.random_seed, "of requests that name no seed")->group("Memory and scheduling");
}

}  // namespace fp4moe
