#include "engine/startup_lines.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "base/cpu_info.h"

namespace fp4moe {
namespace {

std::string model_line(const StartupFacts& facts) {
  const ModelConfig& m = facts.model;
  std::ostringstream line;
  line << "model      " << facts.info.name << ": " << m.architecture << ", " << m.num_layers
       << " layers, hidden size " << m.hidden_size << ", vocabulary " << m.vocab_size;
  return line.str();
}

std::string experts_line(const StartupFacts& facts) {
  const ModelConfig& m = facts.model;
  std::ostringstream line;
  line << "experts    " << m.num_experts << " a layer, top " << m.top_k << ", intermediate size "
       << m.intermediate_size << ", " << facts.info.quantization << " in groups of " << m.quant.group_size
       << " (" << m.quant.declared_by << ")";
  return line.str();
}

std::string context_line(const StartupFacts& facts) {
  const EngineConfig& flags = facts.flags;
  std::ostringstream line;
  line << "context    " << facts.info.context_length << " tokens; " << flags.max_running_requests
       << " requests at once, prefill " << flags.chunked_prefill_size << " tokens a request and "
       << flags.max_prefill_tokens << " a step";
  return line.str();
}

std::string loaded_line(const StartupFacts& facts) {
  char text[96];
  const double gigabytes = static_cast<double>(facts.info.weight_bytes) * 1e-9;
  std::snprintf(text, sizeof text, "loaded     in %.2f s, %.2f GB/s", facts.load_seconds,
                gigabytes / std::max(facts.load_seconds, 1e-9));
  return text;
}

}  // namespace

std::vector<std::string> startup_lines(const StartupFacts& facts) {
  const ModelInfo& info = facts.info;
  std::vector<std::string> lines = {
      "fp4moe " FP4MOE_VERSION " on " + cpu_model_name() + ", " + isa_name(facts.plan.isa) + ", " +
          std::to_string(facts.num_threads) + " threads",
      model_line(facts),
      experts_line(facts),
      std::string("numerics   activations ") + (facts.plan.act_dtype == DType::kF32 ? "float32" : "bfloat16"),
  };
  lines.push_back("MoE        " + summary(facts.plan.moe));
  lines.push_back("memory     " + size_string(facts.memory.available_bytes) + " available, " +
                  size_string(facts.memory.budget_bytes) + " for weights and KV pool");
  lines.push_back("           weights " + size_string(info.weight_bytes) + ", KV pool " +
                  size_string(info.kv_bytes) + " = " + std::to_string(info.max_total_tokens) +
                  " tokens in pages of " + std::to_string(facts.flags.page_size));
  lines.push_back(context_line(facts));
  if (!facts.memory.note.empty()) lines.push_back("           " + facts.memory.note);
  lines.push_back(loaded_line(facts));
  return lines;
}

}  // namespace fp4moe
