#include "engine/ranks/rank.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "base/check.h"
#include "engine/startup/memory_plan.h"
#include "model/plan_draft.h"
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
  context_.movers = context_.world;
  if (layout_.attention_tp() == 1) return;
  context_.attention = context_.world;
  if (layout_.dp == 1) return;
  const int first_rank = layout_.dp_rank() * layout_.attention_tp();
  context_.attention =
      &attention_.emplace(*endpoint, first_rank, layout_.attention_tp(), setup.memory.attention, options);
}

ModelOptions Rank::model_options(const RankSetup& setup, BatchModel model, const ModelPlan& plan) const {
  RankContext context = context_;
  const DeviceGroups& groups = device_groups_[static_cast<size_t>(model)];
  context.device_group = groups.attention;
  context.device_world = groups.world;
  context.device_head = groups.head;
  return {
      .act_dtype = plan.act_dtype,
      .kv_dtype = plan.kv_dtype,
      .isa = plan.isa,
      .moe_plan = plan.moe.at_rank(layout_.rank),
      .max_batch_tokens = setup.options.max_batch_tokens,
      .max_logit_rows = setup.options.max_logit_rows,
      .dp_lm_head = setup.flags.enable_dp_lm_head,
      .rank = context,
      .dense_quant = plan.dense_quant,
      .placements = plan.placements,
  };
}

Status Rank::load(const RankSetup& setup, const ProgressSink& progress) {
  config_ = setup.config;
  plan_ = setup.plan;
  form_ = setup.form;
  FP4MOE_ASSIGN_OR_RETURN(
      const KvCounts num_kv_pages,
      agree_on_pages({setup.options.num_kv_pages, setup.options.num_window_pages, setup.options.num_slots,
                      num_replay_rows(setup.config, setup.flags)}));
  options_ = model_options(setup, BatchModel::kTarget, plan_);
  MemoryResource& memory = dense_ops_for(options_).memory();
  if (plan_.draft != nullptr) options_.features = plan_.draft->features;
  FP4MOE_RETURN_IF_ERROR(load_model(setup.checkpoint, progress));
  FP4MOE_ASSIGN_OR_RETURN(
      kv_, KvCache::make(config_, plan_.kv_dtype, num_kv_pages, setup.flags.page_size, layout_, memory));
  if (plan_.draft == nullptr) return {};
  const DraftPlan& draft = *plan_.draft;
  draft_is_separate_ = setup.draft != nullptr;
  draft_options_ = {draft.algorithm, draft.config, model_options(setup, BatchModel::kDraft, draft.plan)};
  FP4MOE_RETURN_IF_ERROR(load_draft(setup.draft == nullptr ? setup.checkpoint : *setup.draft));
  draft_takes_features_ = !draft.features.is_empty();
  FP4MOE_ASSIGN_OR_RETURN(draft_kv_, KvCache::make(draft.config, draft.plan.kv_dtype, {num_kv_pages.full, 0},
                                                   setup.flags.page_size, layout_,
                                                   dense_ops_for(draft_options_->model).memory()));
  return {};
}

Status Rank::load_model(const Checkpoint& checkpoint, const ProgressSink& progress) {
  ProgressSink of_rank;
  if (progress)
    of_rank = [&progress, total = weight_bytes_of_rank(checkpoint, config_, plan_, layout_.rank)](
                  int64_t done, int64_t) { progress(std::min(done, total), total); };
  const auto load = [&]() -> Status {
    const DeviceMemoryScope places(weight_memory_);
    FP4MOE_ASSIGN_OR_RETURN(model_, Model::load(checkpoint, config_, options_, pool_, of_rank));
    if (of_rank) of_rank(INT64_MAX, 0);
    return {};
  };
  if (plan_.device() == DeviceKind::kCuda) return load();
  return load_with_cache(weight_cache_place(checkpoint, plan_, layout_), load, weights_);
}

// The progress is that of the target's weights alone. Weights of a separate checkpoint are loaded once and
// have no places.
Status Rank::load_draft(const Checkpoint& checkpoint) {
  const auto load = [&]() -> Status {
    const DeviceMemoryScope places(draft_is_separate_ ? nullptr : weight_memory_);
    FP4MOE_ASSIGN_OR_RETURN(draft_, load_draft_model(checkpoint, *draft_options_, *model_, pool_, {}));
    return {};
  };
  const Status status = plan_.device() == DeviceKind::kCuda
                            ? load()
                            : load_with_cache(weight_cache_place(checkpoint, plan_.draft->plan, layout_,
                                                                 plan_.flags.speculative_algorithm),
                                              load, draft_weights_);
  return status.with_context("draft model");
}

// Runs `load` with a weight cache, from which the model may then borrow.
Status Rank::load_with_cache(const WeightCachePlace& place, const std::function<Status()>& load,
                             std::unique_ptr<WeightStore>& weights) {
  auto cache = std::make_unique<WeightCache>(place, pool_);
  {
    const WeightStoreScope scope(*cache);
    FP4MOE_RETURN_IF_ERROR(load());
  }
  FP4MOE_RETURN_IF_ERROR(cache->finish());
  weights = std::move(cache);
  return {};
}

// Processes on other machines may have memory for fewer pages.
Result<KvCounts> Rank::agree_on_pages(KvCounts num_pages) {
  if (!world_) return num_pages;
  std::vector<KvCounts> all(static_cast<size_t>(layout_.tp));
  FP4MOE_RETURN_IF_ERROR(world_->exchange({"kv_pages"}, &num_pages, sizeof num_pages, all.data()));
  for (const KvCounts& other : all)
    num_pages = {std::min(num_pages.full, other.full), std::min(num_pages.window, other.window),
                 std::min(num_pages.slots, other.slots), num_pages.replays};
  return num_pages;
}

Status Rank::reload(const std::string& folder, const ProgressSink& progress, Status& refused) {
  const Result<Checkpoint> checkpoint = form_->open_same(folder);
  const Status own = checkpoint.ok() ? check_weights(*checkpoint) : checkpoint.status();
  FP4MOE_RETURN_IF_ERROR(agree_on_reload(own, refused));
  return refused.ok() ? replace_weights(*checkpoint, progress) : Status();
}

Status Rank::check_weights(const Checkpoint& checkpoint) {
  options_.placements = model_->placements();
  ModelOptions options = options_;
  options.checks_only = true;
  FP4MOE_RETURN_IF_ERROR(Model::load(checkpoint, config_, options, pool_, {}).status());
  if (!draft_options_ || draft_is_separate_) return {};
  DraftModelOptions draft = *draft_options_;
  draft.model.checks_only = true;
  return load_draft_model(checkpoint, draft, *model_, pool_, {}).status().with_context("draft model");
}

Status Rank::replace_weights(const Checkpoint& checkpoint, const ProgressSink& progress) {
  if (!draft_is_separate_) draft_.reset();
  model_.reset();
  if (!draft_is_separate_) draft_weights_.reset();
  weights_.reset();
  if (weight_memory_ != nullptr) FP4MOE_RETURN_IF_ERROR(weight_memory_->restart());
  FP4MOE_RETURN_IF_ERROR(load_model(checkpoint, progress));
  if (!draft_options_) return {};
  if (!draft_is_separate_) return load_draft(checkpoint);
  draft_->set_target(*model_);
  return {};
}

// `refused` becomes the status of the first rank whose own status is not OK. Ranks may take very different
// times to read their parts of a checkpoint.
Status Rank::agree_on_reload(const Status& own, Status& refused) {
  refused = own;
  if (!world_) return {};
  struct Refusal {
    int32_t code;
    char message[1020];
  };
  Refusal refusal{static_cast<int32_t>(own.code()), {}};
  own.message().copy(refusal.message, sizeof refusal.message - 1);
  std::vector<int32_t> codes(static_cast<size_t>(layout_.tp));
  world_->set_timeout(kNoDeadline);
  FP4MOE_RETURN_IF_ERROR(world_->exchange({"reload"}, &refusal.code, sizeof refusal.code, codes.data()));
  world_->set_timeout(comm_timeout(plan_.flags));
  const auto first = std::ranges::find_if(codes, [](int32_t code) { return code != 0; });
  if (first == codes.end()) return {};
  const auto rank = static_cast<int>(first - codes.begin());
  FP4MOE_RETURN_IF_ERROR(world_->broadcast({"reload"}, rank, &refusal, sizeof refusal));
  refused = Status(static_cast<StatusCode>(refusal.code), refusal.message)
                .with_context("rank " + std::to_string(rank));
  return {};
}

Status Rank::forward_on_rank(const Batch& batch, float* logits) {
  if (batch.moves_experts) {
    FP4MOE_ASSIGN_OR_RETURN(last_moves_, model_->rebalance_experts());
    return {};
  }
  if (batch.model == BatchModel::kTarget) return model_->forward_model(batch, kv_, logits, pool_);
  FP4MOE_CHECK(draft_ != nullptr, "a batch for a draft model without a draft model");
  return draft_->forward_model(batch, draft_kv_, logits, pool_);
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
