#include "engine/ranks/rank_config.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include "base/hash.h"
#include "model/plan_draft.h"
#include "model/plan_placements.h"
#include "model/resolve_flags.h"

namespace fp4moe {
namespace {

// Hashes the names, file offsets and types of all tensors, but not their bytes.
uint64_t checkpoint_hash(const Checkpoint& checkpoint) {
  uint64_t hash = 0;
  const auto add = [&hash](const void* data, size_t num_bytes) {
    hash = hash64(data, static_cast<int64_t>(num_bytes), hash);
  };
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    add(tensor.name.data(), tensor.name.size());
    add(&tensor.file_offset, sizeof tensor.file_offset);
    const char* dtype = dtype_name(tensor.view.dtype);
    add(dtype, std::char_traits<char>::length(dtype));
  }
  return hash;
}

}  // namespace

int local_ranks(const ModelPlan& plan) {
  const bool is_mpi = plan.moe.fabric().name == std::string_view("mpi");
  return std::max(1, plan.moe.problem().layout.tp / (is_mpi ? launcher_info().num_processes : 1));
}

std::chrono::nanoseconds comm_timeout(const EngineConfig& flags) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(flags.comm_timeout));
}

bool has_window_pages(const ModelConfig& config, const EngineConfig& flags) {
  return KvCache::window(config) > 0 && !flags.disable_hybrid_swa_memory;
}

int64_t most_state_slots(const ModelConfig& config, const EngineConfig& flags, int num_groups) {
  constexpr int64_t kSnapshotsPerRequest = 4;
  if (!config.has_state()) return 0;
  if (flags.max_mamba_cache_size > 0) return 1 + flags.max_mamba_cache_size;
  const int64_t running = (flags.max_running_requests + num_groups - 1) / num_groups;
  return 1 + running * (flags.disable_radix_cache ? 1 : 1 + kSnapshotsPerRequest);
}

int64_t num_replay_rows(const ModelConfig& config, const EngineConfig& flags) {
  return config.has_state() ? rows_per_request(flags) - 1 : 0;
}

StepLimits step_limits(const ModelConfig& config, const ModelPlan& plan, const EngineConfig& flags,
                       const RankGroupOptions& options) {
  const auto pages_for = [&flags](int64_t num_tokens) { return num_tokens / flags.page_size + 1; };
  const int64_t context = flags.context_length > 0 ? flags.context_length : config.max_position_embeddings;
  const int64_t most = flags.max_total_tokens > 0 ? pages_for(flags.max_total_tokens)
                                                  : pages_for(context) * flags.max_running_requests;
  const int64_t max_sequences =
      options.max_logit_rows / rows_per_request(flags) / plan.moe.problem().layout.dp;
  return {.num_groups = plan.moe.problem().layout.dp,
          .max_batch_tokens = options.max_batch_tokens,
          .max_logit_rows = options.max_logit_rows,
          .shares_head = plan.moe.problem().layout.dp > 1 && !flags.enable_dp_lm_head,
          .num_kv_pages = std::max(most, options.num_kv_pages),
          .num_window_pages = options.num_window_pages > 0 ? std::max(most, options.num_kv_pages) : 0,
          .num_slots = most_state_slots(config, flags, plan.moe.problem().layout.dp),
          .num_replay_rows = num_replay_rows(config, flags),
          .max_table_pages = max_sequences * std::min(pages_for(context), most),
          .page_size = flags.page_size,
          .vocab_size = config.vocab_size,
          .draft = draft_shape(plan, options)};
}

DraftShape draft_shape(const ModelPlan& plan, const RankGroupOptions& options) {
  if (plan.draft == nullptr) return {};
  const DraftPlan& draft = *plan.draft;
  return {.vocab_size = draft.config.vocab_size,
          .num_input_ids = draft.num_input_ids,
          .max_positions = draft.max_positions,
          .takes_features = !draft.features.is_empty(),
          .max_batch_tokens = options.max_batch_tokens,
          .max_logit_rows = options.max_logit_rows};
}

const MoePlan* draft_moe(const ModelPlan& plan) {
  return plan.draft == nullptr || plan.draft->config.num_experts == 0 ? nullptr : &plan.draft->plan.moe;
}

namespace {

// Describes a model and how it runs.
std::string model_text(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan) {
  std::ostringstream text;
  text << config.architecture << ", H=" << config.hidden_size << " E=" << config.num_experts
       << " I=" << config.intermediate_size << " K=" << config.top_k << " V=" << config.vocab_size << ", "
       << config.num_layers << " layers, checkpoint " << checkpoint.total_bytes() << " bytes hash "
       << std::hex << checkpoint_hash(checkpoint) << std::dec << ", dtype " << dtype_name(plan.act_dtype)
       << " KV " << dtype_name(plan.kv_dtype) << ", " << summary(plan.moe);
  return text.str();
}

}  // namespace

std::string rank_config_text(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                             const EngineConfig& flags, const RankGroupOptions& options,
                             const Checkpoint* draft) {
  const RankLayout& layout = plan.moe.problem().layout;
  std::ostringstream text;
  text << "fp4moe " FP4MOE_VERSION ", " << model_text(checkpoint, config, plan) << ", tp=" << layout.tp
       << " ep=" << layout.ep << " dp=" << layout.dp << ", a2a budget " << flags.a2a_memory_budget
       << " checksum " << flags.a2a_checksum << " deterministic " << flags.enable_deterministic_inference
       << ", rows " << options.max_batch_tokens << " logits " << options.max_logit_rows << " page size "
       << flags.page_size << " window pages " << (options.num_window_pages > 0) << " states "
       << (options.num_slots > 0) << " timeout " << flags.comm_timeout << placements_text(plan);
  if (plan.draft != nullptr)
    text << ", draft " << flags.speculative_algorithm << " "
         << model_text(draft == nullptr ? checkpoint : *draft, plan.draft->config, plan.draft->plan);
  return text.str();
}

}  // namespace fp4moe
