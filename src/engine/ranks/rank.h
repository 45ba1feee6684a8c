// Rank: one rank's pool, communicators, model shard and KV pages.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "base/thread_pool.h"
#include "base/weight_store.h"
#include "comm/communicator.h"
#include "comm/nccl_comm.h"
#include "device/placed_memory.h"
#include "engine/ranks/comm_memory.h"
#include "engine/ranks/rank_config.h"
#include "engine/ranks/rank_group.h"
#include "engine/startup/weight_cache.h"
#include "io/checkpoint/checkpoint_form.h"
#include "model/draft_models.h"
#include "model/kv_cache.h"

namespace fp4moe {

// For a rank on a GPU whose peers are in other processes: how it reaches them.
struct OtherProcesses {
  NcclComm& nccl;
  std::function<Status()> meet;  // waits, without a time limit, until all ranks call it
};

// The inputs from which all ranks of a process are loaded.
struct RankSetup {
  const Checkpoint& checkpoint;
  const ModelConfig& config;
  const ModelPlan& plan;
  const EngineConfig& flags;
  const RankGroupOptions& options;
  const CommMemory& memory;
  int num_threads = 1;                         // per rank
  const Checkpoint* draft = nullptr;           // of plan.draft; null: `checkpoint`
  std::shared_ptr<const CheckpointForm> form;  // of `checkpoint`
  const OtherProcesses* others = nullptr;      // null: on CPUs, and if all ranks are in this process
};

// Computes Engine::expert_load() from the ranks' counters. `ranks`: the models of this process's ranks, at
// least one; num_ranks: the number of ranks in the whole job.
ExpertLoad sum_expert_load(std::span<const Model* const> ranks, int num_ranks);

// Large because a rank has a target and perhaps a draft model, each with its weights and pages.
class Rank {
 public:
  // `endpoint` is borrowed; null if there is only one rank.
  Rank(const RankSetup& setup, int rank, Endpoint* endpoint);

  // With several ranks, all of them must call load(), which first makes them agree on the smallest numbers of
  // KV pages.
  Status load(const RankSetup& setup, const ProgressSink& progress);
  Status forward_on_rank(const Batch& batch, float* logits);
  // The result of the last batch with moves_experts.
  const ExpertMoves& last_moves() const { return last_moves_; }

  // Between steps: replaces the weights by those of the checkpoint `folder`. With several ranks on CPUs, all
  // of them must call it. If any of them cannot open the checkpoint, or finds a wrong form or value in it,
  // returns OK and the reason in `refused`, on all ranks, and the weights are as before. After any other
  // error the weights are lost.
  Status reload(const std::string& folder, const ProgressSink& progress, Status& refused);
  // The two parts of reload(). check_weights() loads and drops one layer after another, with the experts that
  // this rank has at present. A draft model with a separate checkpoint keeps its weights.
  Status check_weights(const Checkpoint& checkpoint);
  Status replace_weights(const Checkpoint& checkpoint, const ProgressSink& progress);

  // GPU: sets RankContext's device_group, device_world and device_head for a model. Call before load().
  struct DeviceGroups {
    const DeviceCommunicator *attention = nullptr, *world = nullptr, *head = nullptr;
  };
  void set_device_groups(BatchModel model, const DeviceGroups& groups) {
    device_groups_[static_cast<size_t>(model)] = groups;
  }
  // GPU: the weights' memory, which must outlive this object. Call before load().
  void set_weight_memory(PlacedMemory* memory) { weight_memory_ = memory; }

  // GPU: sets RankContext::movers, whose memory is this region, and move_area. Call before load().
  void set_movers(Endpoint& endpoint, const CommRegion& region, const CommOptions& options, MoveArea area) {
    context_.move_area = std::move(area);
    context_.movers = &movers_.emplace(endpoint, 0, layout_.tp, region, options);
  }

  const RankLayout& layout() const { return layout_; }
  ThreadPool& pool() { return pool_; }
  const ModelConfig& config() const { return config_; }
  const Model& model() const { return *model_; }  // not while reload() replaces it
  const KvCache& kv() const { return kv_; }
  DType kv_dtype() const { return options_.kv_dtype; }
  const StateCache& states() const { return kv_.state_cache(); }
  // As Executor::kv_token_bytes(), read_page() and write_page().
  int64_t page_token_bytes(KvLayers layers) const {
    const KvCache* const draft = shared_draft_kv(layers);
    return kv_.token_bytes(layers) + (draft == nullptr ? 0 : draft->token_bytes());
  }
  void read_page(PageId page, int64_t num_tokens, uint8_t* canonical) const {
    if (kv_.sends_pages()) kv_.read_page(page, num_tokens, canonical);
    if (const KvCache* const draft = shared_draft_kv(page.layers); draft != nullptr && draft->sends_pages())
      draft->read_page(page, num_tokens, canonical + num_tokens * kv_.token_bytes());
  }
  void write_page(PageId page, int64_t num_tokens, const uint8_t* canonical) const {
    kv_.write_page(page, num_tokens, canonical);
    if (const KvCache* const draft = shared_draft_kv(page.layers); draft != nullptr)
      draft->write_page(page, num_tokens, canonical + num_tokens * kv_.token_bytes());
  }
  // The pages of a draft model that other nodes get behind those of these layers, or null.
  const KvCache* shared_draft_kv(KvLayers layers) const {
    return draft_takes_features_ && layers == KvLayers::kFull ? &draft_kv_ : nullptr;
  }
  // Bytes of both models, and of both models' pages.
  int64_t weight_bytes() const { return model_->weight_bytes() + draft_bytes().weights; }
  int64_t kv_bytes() const { return kv_.num_bytes() + draft_bytes().kv; }
  // Model::token_ids() of the draft model.
  std::span<const int32_t> draft_token_ids() const {
    return draft_ == nullptr ? std::span<const int32_t>() : draft_->token_ids();
  }
  DraftBytes draft_bytes() const {
    return draft_ == nullptr ? DraftBytes() : DraftBytes{draft_->weight_bytes(), draft_kv_.num_bytes()};
  }

 private:
  // `plan`: of `model`.
  ModelOptions model_options(const RankSetup& setup, BatchModel model, const ModelPlan& plan) const;
  Status load_model(const Checkpoint& checkpoint, const ProgressSink& progress);
  Status load_draft(const Checkpoint& checkpoint);
  Status load_with_cache(const WeightCachePlace& place, const std::function<Status()>& load,
                         std::unique_ptr<WeightStore>& weights);
  Result<KvCounts> agree_on_pages(KvCounts num_pages);
  Status agree_on_reload(const Status& own, Status& refused);

  RankLayout layout_;
  ThreadPool pool_;
  // As in the setup.
  ModelConfig config_;
  ModelPlan plan_;
  std::shared_ptr<const CheckpointForm> form_;
  ModelOptions options_;
  std::optional<DraftModelOptions> draft_options_;
  PlacedMemory* weight_memory_ = nullptr;  // null: weights have no fixed places
  std::optional<Communicator> world_, attention_, movers_;
  RankContext context_;
  DeviceGroups device_groups_[2];         // by BatchModel
  std::unique_ptr<WeightStore> weights_;  // the model may borrow from it
  std::unique_ptr<Model> model_;
  KvCache kv_;
  // Only with a draft model; its pages have the same numbers as those of kv_'s full layers.
  std::unique_ptr<WeightStore> draft_weights_;
  std::unique_ptr<Model> draft_;  // may borrow from model_
  KvCache draft_kv_;
  bool draft_takes_features_ = false;
  bool draft_is_separate_ = false;  // the draft model is not part of the target's checkpoint
  ExpertMoves last_moves_;
};

// A group of one rank, without a job. Subclasses implement how a step runs.
class SingleRankGroup : public RankGroup {
 public:
  explicit SingleRankGroup(const RankSetup& setup)
      : rank_(setup, 0, nullptr), draft_shape_(fp4moe::draft_shape(setup.plan, setup.options)) {}

  const ModelConfig& config() const override { return rank_.config(); }
  int num_groups() const override { return 1; }
  int64_t num_kv_pages() const override { return rank_.kv().num_pages(); }
  int64_t num_window_pages() const override { return rank_.kv().num_pages(KvLayers::kWindow); }
  int page_size() const override { return rank_.kv().page_size(); }
  int64_t num_slots() const override { return rank_.kv().state_cache().num_slots(); }
  int64_t kv_token_bytes() const override { return rank_.page_token_bytes(KvLayers::kFull); }
  int64_t window_token_bytes() const override { return rank_.page_token_bytes(KvLayers::kWindow); }
  Status read_page(int, PageId page, int64_t num_tokens, uint8_t* canonical) override {
    rank_.read_page(page, num_tokens, canonical);
    return {};
  }
  Status write_page(int, PageId page, int64_t num_tokens, const uint8_t* canonical) override {
    rank_.write_page(page, num_tokens, canonical);
    return {};
  }
  Status read_state(int, int32_t slot, int64_t first, std::span<uint8_t> canonical) override {
    rank_.states().read_slot(slot, first, canonical);
    return {};
  }
  Status write_state(int, int32_t slot, int64_t first, std::span<const uint8_t> canonical) override {
    rank_.states().write_slot(slot, first, canonical);
    return {};
  }
  Status copy_states(int, std::span<const StateCopy> copies) override {
    rank_.states().copy_slots(copies);
    return {};
  }
  DraftShape draft_shape() const override { return draft_shape_; }
  std::span<const int32_t> draft_token_ids() const override { return rank_.draft_token_ids(); }
  DraftBytes draft_bytes() const override { return rank_.draft_bytes(); }
  ThreadPool& pool() override { return rank_.pool(); }
  Status follow() override { return internal_error("a single rank has no leader to follow"); }
  void abort() override {}
  const Job* job() const override { return nullptr; }
  int64_t weight_bytes() const override { return rank_.weight_bytes(); }
  int64_t kv_bytes() const override { return rank_.kv_bytes(); }
  int64_t comm_bytes() const override { return 0; }
  ExpertLoad expert_load() const override {
    const Model* model = &rank_.model();
    return sum_expert_load({&model, 1}, 1);
  }

 protected:
  Rank rank_;
  const DraftShape draft_shape_;
};

}  // namespace fp4moe
