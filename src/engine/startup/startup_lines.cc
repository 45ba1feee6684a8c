#include "engine/startup/startup_lines.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "base/cpu_info.h"
#include "device/cuda_probe.h"
#include "engine/ranks/rank_config.h"
#include "model/plan_draft.h"
#include "model/resolve_flags.h"

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
  line << "experts    " << m.num_experts << " per layer, top " << m.top_k << ", intermediate size "
       << m.intermediate_size << ", " << facts.info.quantization << " in groups of " << m.quant.group_size
       << " (" << m.quant.declared_by << ")";
  return line.str();
}

std::string numerics_line(const ModelPlan& plan) {
  const std::string activations = plan.act_dtype == DType::kF32 ? "float32" : "bfloat16";
  const auto dense = [&] {
    switch (plan.dense_quant) {
      case DenseQuant::kQ8:
        return "q8: 8 bits and a bfloat16 scale per block of 32 (--dense-quant none: bfloat16)";
      case DenseQuant::kFp8:
        return "fp8: E4M3 and a float32 scale per output row (--dense-quant none: bfloat16)";
      default:
        return "bfloat16";
    }
  };
  return "numerics   activations " + activations + ", dense layers " + dense();
}

// Empty if the KV cache has the activations' type and the checkpoint declares none.
std::string kv_cache_text(const ModelPlan& plan, const QuantConfig& quant) {
  const std::string declared = quant.kv_cache_type.empty() ? "" : quant.kv_cache_type + " declared; ";
  if (plan.kv_dtype == DType::kF8E4M3)
    return declared + "E4M3 codes times the layer's scales, which are 1 if the checkpoint has none";
  return declared.empty() ? "" : declared + "served as bf16";
}

std::string context_line(const StartupFacts& facts) {
  const EngineConfig& flags = facts.flags;
  std::ostringstream line;
  line << "context    " << facts.info.context_length << " tokens; " << flags.max_running_requests
       << " requests at once, prefill " << flags.chunked_prefill_size << " tokens per request and "
       << flags.max_prefill_tokens << " per step";
  return line.str();
}

std::string window_line(const StartupFacts& facts) {
  const MemoryPlan& memory = facts.memory;
  const int64_t num_tokens =
      memory.num_window_pages * facts.flags.page_size * facts.plan.moe.problem().layout.dp;
  return "           of these, layers with a window of " + std::to_string(KvCache::window(facts.model)) +
         " tokens hold " + std::to_string(num_tokens) + " (--swa-full-tokens-ratio " +
         std::to_string(static_cast<double>(memory.num_window_pages) /
                        static_cast<double>(memory.num_kv_pages))
             .substr(0, 6) +
         ")";
}

// The fixed part of the KV pool.
std::string state_line(const StartupFacts& facts) {
  const MemoryPlan& memory = facts.memory;
  const int64_t num_replays = num_replay_rows(facts.model, facts.flags);
  const int64_t slot_bytes =
      StateCache::bytes_per_slot(facts.model) + num_replays * StateCache::bytes_per_replay_row(facts.model);
  const int64_t num_groups = facts.plan.moe.problem().layout.dp;
  return "           of this, " + size_string(memory.num_slots * num_groups * slot_bytes) + " are " +
         std::to_string((memory.num_slots - 1) * num_groups) + " states of " + size_string(slot_bytes) +
         (num_replays > 0 ? " with " + std::to_string(num_replays) + " drafts" : "") + ", for " +
         std::to_string(facts.flags.max_running_requests) +
         " running requests and snapshots of reused prefixes";
}

// The draft model and its part of the memory; empty without one.
std::vector<std::string> draft_lines(const StartupFacts& facts) {
  if (facts.plan.draft == nullptr) return {};
  const DraftPlan& draft = *facts.plan.draft;
  const DraftBytes bytes = facts.ranks.draft_bytes();
  std::ostringstream line;
  line << "draft      " << (draft.folder.empty() ? "the MTP layer" : draft.folder) << ": "
       << draft.config.architecture << ", " << draft.config.num_layers << " layer"
       << (draft.config.num_layers == 1 ? "" : "s") << ", hidden size " << draft.config.hidden_size
       << "; weights " << size_string(bytes.weights) << " and KV pages " << size_string(bytes.kv)
       << " of those below";
  if (draft.config.num_experts == 0) return {line.str()};
  return {line.str(), "           MoE " + summary(draft.plan.moe)};
}

std::string loaded_line(const StartupFacts& facts) {
  char text[96];
  const double gigabytes = static_cast<double>(facts.info.weight_bytes) * 1e-9;
  std::snprintf(text, sizeof text, "loaded     in %.2f s, %.2f GB/s", facts.load_seconds,
                gigabytes / std::max(facts.load_seconds, 1e-9));
  return text;
}

std::string shard_text(const char* what, const Shard& shard) {
  if (shard.count == 0) return std::string("no ") + what;
  return std::string(what) + " " + std::to_string(shard.first) + " to " +
         std::to_string(shard.first + shard.count - 1);
}

// Returns a line such as "           rank 2: group 1, query heads 0 to 7, experts 32 to 47".
std::string rank_line(const StartupFacts& facts, int rank) {
  RankLayout layout = facts.plan.moe.problem().layout;
  layout.rank = rank;
  MoeProblem problem = facts.plan.moe.problem();
  problem.layout = layout;
  const HeadShard heads = head_shard(facts.model.num_heads, facts.model.num_kv_heads, layout.attention_tp(),
                                     layout.attention_rank());
  return "           rank " + std::to_string(rank) + ": group " + std::to_string(layout.dp_rank()) + ", " +
         shard_text("query heads", heads.query) + ", " +
         (layout.ep > 1 ? shard_text(problem.num_redundant > 0 ? "physical experts" : "experts",
                                     problem.local_experts())
                        : shard_text("rows", problem.local_intermediate()) + " of every expert");
}

std::string in_processes(const Job& job) {
  return " in " + std::to_string(job.num_processes()) + " process" + (job.num_processes() == 1 ? "" : "es") +
         ", fabric " + job.fabric().name;
}

std::string on_gpus(int num_ranks) {
  const int last = gpu_of_rank(num_ranks - 1);
  return last == 0 ? " on GPU 0" : " on GPUs 0 to " + std::to_string(last);
}

// Adds the lines about ranks; adds none for a single CPU or GPU rank.
void add_rank_lines(const StartupFacts& facts, std::vector<std::string>& lines) {
  const RankLayout& layout = facts.plan.moe.problem().layout;
  const Job* job = facts.ranks.job();
  if (job == nullptr && layout.tp == 1) return;
  std::ostringstream line;
  line << "ranks      " << layout.tp << (job == nullptr ? on_gpus(layout.tp) : in_processes(*job)) << "; "
       << layout.dp << " data-parallel group" << (layout.dp == 1 ? "" : "s") << " of "
       << layout.attention_tp() << ", ep " << layout.ep << "; " << facts.ranks.pool().num_threads()
       << " thread(s) each";
  lines.push_back(line.str());
  constexpr int kMostShown = 8;
  for (int rank = 0; rank < layout.tp; ++rank)
    if (layout.tp <= kMostShown || rank == 0 || rank == layout.tp - 1)
      lines.push_back(rank_line(facts, rank));
  const int local = job == nullptr ? layout.tp : job->num_local_ranks();
  const CommMemory& comm = facts.comm;
  lines.push_back("           memory per rank: weights " + size_string(facts.info.weight_bytes / local) +
                  ", KV " + size_string(facts.info.kv_bytes / local) + ", communication heap " +
                  size_string(comm.heap_bytes) + " (collectives " + size_string(comm.communicator_bytes) +
                  ", a2a " + size_string(comm.a2a_bytes) + ", steps " + size_string(comm.step_bytes) + ")");
}

}  // namespace

std::vector<std::string> startup_lines(const StartupFacts& facts) {
  const ModelInfo& info = facts.info;
  const bool is_gpu = facts.plan.device() == DeviceKind::kCuda;
  std::vector<std::string> lines = {
      "fp4moe " FP4MOE_VERSION " on " + cpu_model_name() + ", " + isa_name(facts.plan.isa) + ", " +
          std::to_string(facts.ranks.pool().num_threads()) + " threads" +
          (is_gpu ? "; " + describe_cuda(facts.plan.gpu()) : ""),
      model_line(facts),
      experts_line(facts),
      numerics_line(facts.plan),
  };
  lines.push_back("MoE        " + summary(facts.plan.moe));
  add_rank_lines(facts, lines);
  for (std::string& line : draft_lines(facts)) lines.push_back(std::move(line));
  if (facts.model.num_mtp_layers > 0 && !drafts_with_mtp(facts.plan))
    lines.push_back("MTP        " + std::to_string(facts.model.num_mtp_layers) +
                    " layer(s) of multi-token prediction in the checkpoint, skipped");
  if (const std::string text = kv_cache_text(facts.plan, facts.model.quant); !text.empty())
    lines.push_back("KV cache   " + text);
  lines.push_back("memory     " + size_string(facts.memory.available_bytes) +
                  (is_gpu ? " free on the GPU, " : " available, ") + size_string(facts.memory.budget_bytes) +
                  (is_gpu ? " for weights, KV pool and activations" : " for weights and KV pool"));
  lines.push_back("           weights " + size_string(info.weight_bytes) + ", KV pool " +
                  size_string(info.kv_bytes) + " = " + std::to_string(info.max_total_tokens) +
                  " tokens in pages of " + std::to_string(facts.flags.page_size));
  if (facts.memory.num_window_pages > 0) lines.push_back(window_line(facts));
  if (facts.memory.num_slots > 0) lines.push_back(state_line(facts));
  lines.push_back(context_line(facts));
  if (!facts.memory.state_note.empty()) lines.push_back("           " + facts.memory.state_note);
  if (!info.speculative_algorithm.empty())
    lines.push_back("           speculative decoding by " + info.speculative_algorithm + ", at most " +
                    std::to_string(rows_per_request(facts.flags) - 1) + " draft tokens per request and step" +
                    (facts.flags.speculative_adaptive ? ", as far as they pay" : ""));
  if (!facts.memory.note.empty()) lines.push_back("           " + facts.memory.note);
  lines.push_back(loaded_line(facts));
  return lines;
}

}  // namespace fp4moe
