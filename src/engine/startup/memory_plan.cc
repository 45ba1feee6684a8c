#include "engine/startup/memory_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>

#include "base/check.h"
#include "base/cpu_info.h"
#include "comm/job.h"
#include "device/device_info.h"
#include "device/device_memory.h"
#include "engine/ranks/rank_config.h"
#include "io/checkpoint/mtp_layers.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/device_sampler.h"
#include "model/kv_cache.h"
#include "model/plan_draft.h"
#include "model/resolve_flags.h"

namespace fp4moe {
namespace {

std::string decimal(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", x);
  return text;
}

bool is_gpu(const MemoryProblem& problem) { return problem.device == DeviceKind::kCuda; }

// Suggests the smallest --mem-fraction-static, in hundredths, with which num_bytes fit, or else names the
// memory required.
std::string fraction_advice(int64_t num_bytes, const MemoryProblem& problem) {
  constexpr double kLargestSensible = 0.95;  // activations, the process and other programs need the rest
  const double needed =
      std::ceil(100.0 * static_cast<double>(num_bytes) / static_cast<double>(problem.available_bytes)) / 100;
  if (needed <= kLargestSensible) return "--mem-fraction-static " + decimal(needed) + " would do";
  const std::string size = size_string(static_cast<int64_t>(num_bytes / kLargestSensible));
  return is_gpu(problem) ? "this needs a GPU with about " + size + " free"
                         : "this needs a machine with about " + size + " available";
}

std::string budget_string(const MemoryPlan& plan, const MemoryProblem& problem, const EngineConfig& flags) {
  return size_string(plan.budget_bytes) + " (--mem-fraction-static " + decimal(flags.mem_fraction_static) +
         " of " + size_string(plan.available_bytes) + (is_gpu(problem) ? " free on the GPU)" : " available)");
}

int64_t fixed_bytes(const MemoryProblem& problem) {
  return problem.weight_bytes + problem.comm_bytes + problem.work_bytes;
}

// Checks that the weights and everything else outside the KV pool fit in the budget.
Status check_fixed(const MemoryProblem& problem, const EngineConfig& flags, const MemoryPlan& plan) {
  const int64_t fixed = fixed_bytes(problem), rest = plan.budget_bytes - (fixed - problem.work_bytes);
  if (fixed <= plan.budget_bytes) return {};
  std::string what = "the weights take " + size_string(problem.weight_bytes);
  if (problem.comm_bytes > 0) what += " and the ranks' heaps take " + size_string(problem.comm_bytes);
  if (problem.work_bytes > 0)
    what += " and the activations for " + std::to_string(flags.max_prefill_tokens) +
            " prompt tokens per step take " + size_string(problem.work_bytes);
  what += ", which is " + size_string(fixed - plan.budget_bytes) + " more than " +
          budget_string(plan, problem, flags) + "; ";
  const int64_t per_token = std::max<int64_t>(problem.work_bytes_per_token, 1);
  const int64_t tokens = flags.max_prefill_tokens - (problem.work_bytes - rest + per_token - 1) / per_token;
  if (problem.work_bytes_per_token > 0 && rest > 0 && tokens > 0)
    return does_not_fit(what + "--max-prefill-tokens " + std::to_string(tokens) + " would do");
  return does_not_fit(what + fraction_advice(fixed, problem));
}

// Returns the number of window pages beside num_pages full pages. A window page is used or cached only beside
// the full page of the same tokens, so more of them than full pages are never needed.
int64_t window_pages_for(const MemoryProblem& problem, const EngineConfig& flags, int64_t num_pages) {
  constexpr int64_t kFullPagesPerCached = 16;
  if (problem.window_bytes_per_page == 0) return 0;
  int64_t wanted = problem.wanted_window_pages;
  if (flags.swa_full_tokens_ratio > 0)
    wanted = static_cast<int64_t>(std::ceil(flags.swa_full_tokens_ratio * static_cast<double>(num_pages)));
  else if (!flags.disable_radix_cache)
    wanted += num_pages / kFullPagesPerCached;
  return std::min(wanted, num_pages);
}

int64_t pool_bytes(const MemoryProblem& problem, const EngineConfig& flags, int64_t num_pages) {
  return num_pages * (problem.kv_bytes_per_page + problem.edit_bytes_per_page) +
         window_pages_for(problem, flags, num_pages) * problem.window_bytes_per_page;
}

// Returns the most full pages that fit in num_bytes together with their window pages.
int64_t most_pages(const MemoryProblem& problem, const EngineConfig& flags, int64_t num_bytes) {
  int64_t fits = 0, too_many = std::min<int64_t>(num_bytes / problem.kv_bytes_per_page,
                                                 std::numeric_limits<int32_t>::max()) +
                               1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (pool_bytes(problem, flags, middle) <= num_bytes ? fits : too_many) = middle;
  }
  return fits;
}

std::string pages_string(const MemoryProblem& problem, const EngineConfig& flags, int64_t num_pages) {
  std::string text = std::to_string(num_pages) + " KV pages of " + size_string(problem.kv_bytes_per_page);
  if (problem.window_bytes_per_page > 0)
    text += " and " + std::to_string(window_pages_for(problem, flags, num_pages)) + " window pages of " +
            size_string(problem.window_bytes_per_page);
  return text;
}

int64_t state_bytes(const MemoryProblem& problem, const MemoryPlan& plan) {
  return plan.num_slots * problem.state_bytes_per_slot;
}

// Sets the number of slots, and lowers that of running requests to it.
Status plan_slots(const MemoryProblem& problem, const EngineConfig& flags, MemoryPlan& plan) {
  plan.max_running_requests = flags.max_running_requests;
  if (problem.state_bytes_per_slot == 0) return {};
  const int64_t rest = plan.budget_bytes - fixed_bytes(problem);
  const double share = flags.mamba_full_memory_ratio / (1 + flags.mamba_full_memory_ratio);
  const bool is_given = flags.max_mamba_cache_size > 0;
  const int64_t most = is_given ? rest : static_cast<int64_t>(share * static_cast<double>(rest));
  const int64_t fits = most / problem.state_bytes_per_slot;
  constexpr int64_t kLeast = 2;  // scrap and one request
  const std::string slot = "a state of " + size_string(problem.state_bytes_per_slot);
  if (is_given && problem.most_state_slots > fits)
    return does_not_fit(
        "--max-mamba-cache-size " + std::to_string(flags.max_mamba_cache_size) + " with " + slot +
        " per request exceeds the " + size_string(most) + " beside the weights; " +
        (fits >= kLeast
             ? "--max-mamba-cache-size " + std::to_string(fits - 1) + " would do"
             : fraction_advice(fixed_bytes(problem) + kLeast * problem.state_bytes_per_slot, problem)));
  if (fits < kLeast)
    return does_not_fit(
        slot + " per request, twice, exceeds the " + size_string(most) +
        " that --mamba-full-memory-ratio gives to states; " +
        fraction_advice(fixed_bytes(problem) + 2 * kLeast * problem.state_bytes_per_slot, problem));
  plan.num_slots = std::min(problem.most_state_slots, fits);
  const int64_t most_running = (plan.num_slots - 1) * problem.num_groups;
  if (most_running >= flags.max_running_requests) return {};
  plan.max_running_requests = most_running;
  plan.state_note = "at most " + std::to_string(most_running) + " requests run at once instead of " +
                    std::to_string(flags.max_running_requests) + " (--max-running-requests): each needs " +
                    slot;
  return {};
}

// Returns the number of pages in the pool: as --max-total-tokens requires or, if that is 0, as many as fit,
// but at most a full context for every running request.
Result<int64_t> plan_pages(const MemoryProblem& problem, const EngineConfig& flags, const MemoryPlan& plan,
                           int64_t wanted_context) {
  const int64_t page_size = flags.page_size;
  const int64_t fixed = fixed_bytes(problem) + state_bytes(problem, plan);
  const int64_t rest = plan.budget_bytes - fixed;
  const int64_t most = most_pages(problem, flags, rest);
  const std::string left = size_string(rest) + " that the weights " +
                           (plan.num_slots > 0 ? "and states " : "") + "leave of " +
                           budget_string(plan, problem, flags);
  const int64_t one = pool_bytes(problem, flags, 1);
  if (most < 1)
    return does_not_fit("one KV page of " + size_string(one) + " exceeds the " + left + "; " +
                        fraction_advice(fixed + one, problem));
  const auto pages_for = [&](int64_t num_tokens) {
    return num_tokens / page_size + (num_tokens % page_size != 0);
  };
  if (flags.max_total_tokens == 0) {
    const int64_t per_request = pages_for(wanted_context);
    const int64_t running = plan.max_running_requests;
    return most / running < per_request ? most : per_request * running;
  }
  const int64_t wanted = pages_for(flags.max_total_tokens);
  if (wanted > most)
    return does_not_fit("--max-total-tokens " + std::to_string(flags.max_total_tokens) + " needs " +
                        pages_string(problem, flags, wanted) + ", more than the " + left +
                        "; --max-total-tokens " + std::to_string(most * page_size) + " would do");
  return wanted;
}

// Checks that the window pages that --swa-full-tokens-ratio gives are enough for one request.
Status check_window_pages(const MemoryProblem& problem, const EngineConfig& flags, const MemoryPlan& plan) {
  const int64_t least = std::min(problem.least_window_pages, plan.num_kv_pages);
  if (plan.num_window_pages >= least) return {};
  const double needed = std::ceil(1e4 * static_cast<double>(least) / static_cast<double>(plan.num_kv_pages));
  char ratios[64];
  std::snprintf(ratios, sizeof ratios, "; --swa-full-tokens-ratio %.4f would do", needed / 1e4);
  return does_not_fit("--swa-full-tokens-ratio " + std::to_string(flags.swa_full_tokens_ratio) + " gives " +
                      std::to_string(plan.num_window_pages) + " window pages beside " +
                      std::to_string(plan.num_kv_pages) + " KV pages, but one request needs " +
                      std::to_string(least) + ratios);
}

}  // namespace

std::string size_string(int64_t num_bytes) {
  constexpr double kMiB = 1024.0 * 1024.0;
  const double mib = static_cast<double>(num_bytes) / kMiB;
  return mib < 1024 ? decimal(mib) + " MiB" : decimal(mib / 1024) + " GiB";
}

int64_t head_bytes(const TensorEntry& embedding, DenseQuant quant) {
  const TensorView& view = embedding.view;
  if (quant == DenseQuant::kNone || view.dtype != DType::kBF16 || view.shape.size() != 2)
    return view.num_bytes();
  const int64_t n = view.shape[0], k = view.shape[1];
  return quant == DenseQuant::kFp8 ? fp8_weight_bytes(quantized_fp8_shape(n, k), LinearLayout::kPanel16Fp8)
                                   : linear_weight_bytes(n, k, LinearLayout::kPanel16Q8);
}

int64_t held_bytes(const TensorEntry& tensor, DenseQuant quant) {
  const auto has = [&tensor](std::string_view part) { return tensor.name.find(part) != std::string::npos; };
  // MLA's up-projections multiply f32 rows per head, so they stay bf16.
  const TensorView& view = tensor.view;
  if (view.dtype == DType::kF8E4M3 && view.shape.size() == 2 && tensor.name.ends_with(".weight"))
    return has("kv_b_proj") ? 2 * view.num_elems()
                            : fp8_weight_bytes({view.shape[0], view.shape[1], 1, kFp8WeightBlock},
                                               LinearLayout::kPanel16Fp8);
  const bool is_dense = !has(".experts.") && (has("lm_head") || (has("_proj") && !has("kv_b_proj")));
  return is_dense ? head_bytes(tensor, quant) : tensor.view.num_bytes();
}

namespace {

// Returns the bytes of a rank's part of the tensors that `is_counted` selects, stored as `quant` requires.
template <class Counted>
int64_t shard_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                    DenseQuant quant, const Counted& is_counted) {
  const MoeProblem& moe = plan.moe.problem();
  const RankLayout& layout = moe.layout;
  const int64_t head_parts =
      layout.dp > 1 && !plan.flags.enable_dp_lm_head ? layout.tp : layout.attention_tp();
  const int64_t shared_parts = plan.moe.shared_expert_is_sharded() ? layout.tp : 1;
  int64_t sum = 0;
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    const std::string_view name = tensor.name;
    if (!is_counted(name) || is_mtp_copy(config, name)) continue;
    if (!drafts_with_mtp(plan) && is_mtp_tensor(config, checkpoint, name)) continue;
    const auto has = [&name](std::string_view part) { return name.find(part) != name.npos; };
    const int64_t num_bytes = held_bytes(tensor, quant);
    if (has(".experts.")) {
      sum += num_bytes / layout.tp * moe.num_physical() / std::max<int64_t>(moe.num_experts, 1);
    } else if (has("shared_expert")) {
      sum += num_bytes / shared_parts;
    } else if (has("lm_head")) {
      sum += num_bytes / head_parts;
    } else if (has("embed_tokens")) {
      sum += num_bytes + (config.tie_word_embeddings ? head_bytes(tensor, quant) / head_parts : 0);
    } else if (plan.moe.a2a_settings().deterministic && has(".mlp.")) {  // stored whole, but applied to only
                                                                         // some of the rows
      sum += num_bytes;
    } else if (has("_proj") && !has("_a_proj") && !has("eh_proj")) {  // MLA's down-projections and an MTP
                                                                      // layer's projection are replicated
      sum += num_bytes / layout.attention_tp();
    } else {
      sum += num_bytes;
    }
  }
  return sum;
}

}  // namespace

int64_t rank_weight_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan) {
  return shard_bytes(checkpoint, config, plan, plan.dense_quant, [](std::string_view) { return true; });
}

namespace {

// Returns the bytes of the experts of a rank's layers on a GPU.
int64_t device_expert_bytes(const ModelConfig& config, const ModelPlan& plan) {
  if (config.num_experts == 0) return 0;
  const MoeProblem& moe = plan.moe.problem();
  const int64_t h = config.hidden_size, i = moe.local_intermediate().count;
  const int64_t num_layers = config.layer_has_experts.empty()
                                 ? config.num_layers
                                 : std::ranges::count(config.layer_has_experts, true);
  const int64_t expert = tiled_bytes(moe.format, 2 * i, h) + tiled_bytes(moe.format, h, i) +
                         (2 * i + h) * int64_t{sizeof(float)};
  return num_layers * moe.local_experts().count * expert;
}

}  // namespace

int64_t device_weight_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan) {
  const int64_t dense = shard_bytes(checkpoint, config, plan, plan.dense_quant, [](std::string_view name) {
    return name.find(".experts.") == name.npos;
  });
  return dense + device_expert_bytes(config, plan);
}

int64_t weight_bytes_of_rank(const Checkpoint& checkpoint, const ModelConfig& config, ModelPlan plan,
                             int rank) {
  plan.moe = plan.moe.at_rank(rank);
  return plan.device() == DeviceKind::kCuda ? device_weight_bytes(checkpoint, config, plan)
                                            : rank_weight_bytes(checkpoint, config, plan);
}

namespace {

// Returns upper bounds on the bytes that a forward pass on a GPU needs for each row.
int64_t work_bytes_per_row(const ModelConfig& c) {
  const bool latent = c.mla.kv_lora_rank > 0;
  const int64_t query = c.num_heads * (latent ? c.mla.kv_lora_rank + c.mla.qk_rope_head_dim : c.head_dim);
  const int64_t attention =
      4 * (c.attention_gate ? 4 : 3) * query;  // f32: projections, absorbed queries, gates, outputs
  const DeltaConfig& d = c.delta;              // f32: projections, and a kernel's intermediate rows
  const int64_t delta = 4 * (3 * d.conv_channels() + d.num_value_heads * (2 * d.value_head_dim + 2));
  const int64_t experts = c.top_k * (4 * c.intermediate_size + 4 * c.hidden_size) + 8 * c.num_experts;
  const int64_t mlp = 12 * std::max(c.dense_intermediate_size, c.shared_intermediate_size);
  const int64_t shared = c.shared_intermediate_size > 0 ? 8 * c.hidden_size : 0;
  return 22 * c.hidden_size + 2 * query +
         std::max({attention, delta, experts + mlp + shared, int64_t{4} * mlp / 3});
}

// Returns the bytes of a draft model's pass for each row, with the features that the target keeps and the
// draft model's own.
int64_t draft_work_bytes_per_row(const ModelConfig& target, const DraftPlan& draft) {
  const int64_t h = draft.config.hidden_size;
  int64_t num_bytes = work_bytes_per_row(draft.config);
  if (draft.features.is_empty()) return num_bytes;
  const int64_t kept = std::ssize(draft.features.after_layers) + draft.features.is_final_norm;
  const int64_t inputs = 2 * kept * target.hidden_size + 16 * h;  // in both types; joined, normed
  return num_bytes + 4 * kept * target.hidden_size + 4 * h + 4 * inputs;
}

void add_work(const ModelConfig& c, const ModelPlan& plan, const EngineConfig& flags,
              MemoryProblem& problem) {
  constexpr int64_t kFixed = int64_t{512} << 20;  // context, libraries' workspaces, graphs, upload slots
  const DraftPlan* const draft = plan.draft.get();
  problem.work_bytes_per_token =
      work_bytes_per_row(c) + (draft != nullptr ? draft_work_bytes_per_row(c, *draft) : 0);
  const int64_t vocab_size = std::max(c.vocab_size, draft != nullptr ? draft->config.vocab_size : 0);
  const int64_t num_decode_rows = flags.max_running_requests * rows_per_request(flags);
  const int64_t tokens = flags.max_prefill_tokens + num_decode_rows;
  problem.work_bytes = kFixed + tokens * problem.work_bytes_per_token +
                       num_decode_rows * vocab_size * int64_t{2 * sizeof(float)};
}

// Sets the sizes of the pages in the pools of num_ranks ranks.
void add_pages(const ModelConfig& config, const ModelPlan& plan, const EngineConfig& flags, int64_t num_ranks,
               MemoryProblem& problem) {
  const RankLayout& layout = plan.moe.problem().layout;
  const KvCounts bytes = KvCache::bytes_per_page(config, plan.kv_dtype, flags.page_size, layout);
  problem.state_bytes_per_slot = num_ranks * (bytes.slots + num_replay_rows(config, flags) * bytes.replays);
  problem.most_state_slots = most_state_slots(config, flags, layout.dp);
  problem.num_groups = layout.dp;
  if (!has_window_pages(config, flags)) {
    problem.kv_bytes_per_page = num_ranks * (bytes.full + bytes.window);
    return;
  }
  problem.kv_bytes_per_page = num_ranks * bytes.full;
  problem.window_bytes_per_page = num_ranks * bytes.window;
  const KvWindow window{KvCache::window(config), flags.page_size};
  const auto part = [&](int64_t n) { return (n + layout.dp - 1) / layout.dp; };
  problem.least_window_pages = window.most_pages(1);
  const int64_t decode_pages = window.most_pages(rows_per_request(flags));
  // Every request in decode, plus the prompts' rows, which fill at most one page more in each request.
  problem.wanted_window_pages = part(flags.max_running_requests) * (decode_pages + 1) +
                                part(flags.max_prefill_tokens) / flags.page_size;
}

// Adds a draft model, which has a page beside every full page. Without a separate checkpoint, its weights are
// among the target's, on a GPU except for its experts.
void add_draft(const DraftPlan& draft, const Checkpoint* checkpoint, int64_t num_ranks,
               MemoryProblem& problem) {
  const RankLayout& layout = draft.plan.moe.problem().layout;
  const KvCounts bytes =
      KvCache::bytes_per_page(draft.config, draft.plan.kv_dtype, draft.plan.flags.page_size, layout);
  problem.kv_bytes_per_page += num_ranks * (bytes.full + bytes.window);
  if (problem.device == DeviceKind::kCuda)
    problem.weight_bytes += checkpoint != nullptr ? device_weight_bytes(*checkpoint, draft.config, draft.plan)
                                                  : device_expert_bytes(draft.config, draft.plan);
  else if (checkpoint != nullptr)
    problem.weight_bytes += num_ranks * rank_weight_bytes(*checkpoint, draft.config, draft.plan);
}

}  // namespace

Result<MemoryProblem> memory_problem(const Checkpoint& checkpoint, const ModelConfig& config,
                                     const ModelPlan& plan, const EngineConfig& flags,
                                     const Checkpoint* draft) {
  if (plan.device() == DeviceKind::kCuda) {
    MemoryProblem problem{
        .device = plan.device(),
        .weight_bytes = device_weight_bytes(checkpoint, config, plan),
        .max_position_embeddings = config.max_position_embeddings,
    };
    if (plan.absent_gpu) problem.available_bytes = plan.absent_gpu->memory_bytes;
    for (int rank = 0; !plan.absent_gpu && rank < local_ranks(plan); ++rank) {
      FP4MOE_ASSIGN_OR_RETURN(const DeviceMemoryInfo memory, device_memory_info(gpu_of_rank(rank)));
      const int64_t free_bytes = memory.free_bytes / ranks_per_gpu();
      problem.available_bytes = rank == 0 ? free_bytes : std::min(problem.available_bytes, free_bytes);
    }
    add_pages(config, plan, flags, 1, problem);
    problem.edit_bytes_per_page =
        (rows_per_request(flags) - 1) * flags.page_size * int64_t{sizeof(LogitEdit)};
    add_work(config, plan, flags, problem);
    if (plan.draft != nullptr) add_draft(*plan.draft, draft, 1, problem);
    return problem;
  }
  const bool is_mpi = plan.moe.fabric().name == std::string_view("mpi");
  const int64_t num_ranks = local_ranks(plan);
  MemoryProblem problem{
      .available_bytes = available_memory_bytes() / (is_mpi ? launcher_info().local_processes : 1),
      .weight_bytes = num_ranks * rank_weight_bytes(checkpoint, config, plan),
      .max_position_embeddings = config.max_position_embeddings,
  };
  add_pages(config, plan, flags, num_ranks, problem);
  if (plan.draft != nullptr) add_draft(*plan.draft, draft, num_ranks, problem);
  return problem;
}

Result<MemoryPlan> plan_memory(const MemoryProblem& problem, const EngineConfig& flags) {
  if (flags.context_length > problem.max_position_embeddings)
    return does_not_fit("--context-length " + std::to_string(flags.context_length) +
                        " is too long; the model supports at most " +
                        std::to_string(problem.max_position_embeddings) +
                        " tokens (max_position_embeddings)");
  MemoryPlan plan;
  plan.available_bytes = problem.available_bytes;
  plan.budget_bytes =
      static_cast<int64_t>(flags.mem_fraction_static * static_cast<double>(problem.available_bytes));
  FP4MOE_RETURN_IF_ERROR(check_fixed(problem, flags, plan));
  const int64_t wanted_context =
      flags.context_length > 0 ? flags.context_length : problem.max_position_embeddings;
  FP4MOE_RETURN_IF_ERROR(plan_slots(problem, flags, plan));
  FP4MOE_ASSIGN_OR_RETURN(plan.num_kv_pages, plan_pages(problem, flags, plan, wanted_context));
  plan.num_window_pages = window_pages_for(problem, flags, plan.num_kv_pages);
  FP4MOE_RETURN_IF_ERROR(check_window_pages(problem, flags, plan));
  const int64_t pool_tokens = plan.num_kv_pages * flags.page_size;
  plan.context_length = std::min(wanted_context, pool_tokens);
  if (plan.context_length == wanted_context) return plan;
  const std::string holds = "the KV pool holds " + std::to_string(pool_tokens) + " tokens";
  if (flags.context_length > 0)
    return does_not_fit("--context-length " + std::to_string(flags.context_length) + ": " + holds +
                        "; --context-length " + std::to_string(pool_tokens) + " would do");
  plan.note = "context shortened from the model's " + std::to_string(wanted_context) + " tokens: " + holds;
  return plan;
}

}  // namespace fp4moe
