#include "engine/ranks/rank.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "base/check.h"
#include "engine/startup/weight_cache.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

RankLayout layout_of(const ModelPlan& plan, int rank) {
  RankLayout layout = plan.moe.problem().layout;
  layout.rank = rank;
  return layout;
}

}  // namespace

Rank::Rank(const RankSetup& setup, int rank, Endpoint* endpoint)
    : layout_(layout_of(setup.plan, rank)), pool_(setup.num_threads) {
  context_.layout = layout_;
  if (endpoint == nullptr) return;
  const CommOptions options{.timeout = comm_timeout(setup.flags), .checksum = setup.flags.a2a_checksum};
  context_.a2a_region_offset = setup.memory.a2a_offset;
  context_.world = &world_.emplace(*endpoint, 0, layout_.tp, setup.memory.world, options);
  if (layout_.attention_tp() == 1) return;
  context_.attention = context_.world;
  if (layout_.dp == 1) return;
  const int first_rank = layout_.dp_rank() * layout_.attention_tp();
  context_.attention =
      &attention_.emplace(*endpoint, first_rank, layout_.attention_tp(), setup.memory.attention, options);
}

Status Rank::load(const RankSetup& setup, const ProgressSink& progress) {
  const RankGroupOptions& options = setup.options;
  FP4MOE_ASSIGN_OR_RETURN(const KvCounts num_kv_pages,
                          agree_on_pages({options.num_kv_pages, options.num_window_pages}));
  const ModelOptions model_options{
      .act_dtype = setup.plan.act_dtype,
      .kv_dtype = setup.plan.kv_dtype,
      .isa = setup.plan.isa,
      .moe_plan = setup.plan.moe.at_rank(layout_.rank),
      .max_batch_tokens = options.max_batch_tokens,
      .max_logit_rows = options.max_logit_rows,
      .dp_lm_head = setup.flags.enable_dp_lm_head,
      .rank = context_,
      .dense_quant = setup.plan.dense_quant,
  };
  FP4MOE_RETURN_IF_ERROR(load_model(setup, model_options, progress));
  FP4MOE_ASSIGN_OR_RETURN(
      kv_, KvCache::make(setup.config, setup.plan.kv_dtype, num_kv_pages, setup.flags.page_size, layout_,
                         dense_ops_for(model_options).memory()));
  return {};
}

Status Rank::load_model(const RankSetup& setup, const ModelOptions& options, const ProgressSink& progress) {
  const auto load = [&]() -> Status {
    FP4MOE_ASSIGN_OR_RETURN(model_, Model::load(setup.checkpoint, setup.config, options, pool_, progress));
    return {};
  };
  if (setup.plan.device() == DeviceKind::kCuda) return load();
  auto cache =
      std::make_unique<WeightCache>(weight_cache_place(setup.checkpoint, setup.plan, layout_), pool_);
  {
    const WeightStoreScope scope(*cache);
    FP4MOE_RETURN_IF_ERROR(load());
  }
  FP4MOE_RETURN_IF_ERROR(cache->finish());
  weights_ = std::move(cache);
  return {};
}

// Processes on other machines may have memory for fewer pages.
Result<KvCounts> Rank::agree_on_pages(KvCounts num_pages) {
  if (!world_) return num_pages;
  std::vector<KvCounts> all(static_cast<size_t>(layout_.tp));
  FP4MOE_RETURN_IF_ERROR(world_->exchange({"kv_pages"}, &num_pages, sizeof num_pages, all.data()));
  for (const KvCounts& other : all)
    num_pages = {std::min(num_pages.full, other.full), std::min(num_pages.window, other.window)};
  return num_pages;
}

Status Rank::forward_on_rank(const Batch& batch, float* logits) {
  return model_->forward_model(batch, kv_, logits, pool_);
}

ExpertLoad sum_expert_load(std::span<const Model* const> ranks, int num_ranks) {
  ExpertLoad load;
  load.num_ranks = num_ranks;
  const ExpertCounters& first = ranks.front()->expert_counters();
  load.layers = first.layers();
  load.num_experts = first.num_experts();
  load.tokens.resize(load.layers.size() * static_cast<size_t>(load.num_experts));
  for (const Model* rank : ranks) {
    if (const Status status = rank->expert_counters().add_to(load.tokens); !status.ok())
      return {.failure = status.message()};
    ++load.counted_ranks;
  }
  return load;
}

}  // namespace fp4moe
