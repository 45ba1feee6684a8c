// GpuRank: one rank of a model, on a GPU. It enqueues all steps on one stream, a decode step of a recorded
// size as one graph launch, and samples tokens on the device. Shared experts may run on a second stream. If
// there are several ranks, each runs on a separate thread (gpu_group.cc), and all of them enqueue the same
// steps.
//
// A step that verifies drafts is a decode step with a row for each draft (BatchStage::decodes()). If decode's
// attention stores new keys itself, such steps have separate graphs, in which rows that share pages first
// store their keys (DeviceBatch::shares_pages).
//
// A draft model runs on the same stream, with the same inputs and logits buffers: a pass with one row a
// sequence as one graph launch, too. Its ids are chosen on the device and kept there for later passes.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "comm/device_communicator.h"
#include "device/event.h"
#include "device/graph.h"
#include "device/peer_heap.h"
#include "device/placed_memory.h"
#include "device/side_stream.h"
#include "device/stream.h"
#include "engine/ranks/batch_stage.h"
#include "engine/ranks/executor.h"
#include "engine/ranks/group_pages.h"
#include "engine/ranks/rank.h"

namespace fp4moe {

// The sizes of a step, which all ranks know.
struct GpuStep {
  BatchModel model = BatchModel::kTarget;
  bool chains = false;               // Batch::chains
  bool decodes = true;               // all groups decode, so all ranks run the graph of the same size
  bool verifies = false;             // rows of a group share pages
  int64_t rows = 0, logit_rows = 0;  // of the group with the most rows, padded
  // kDraft: the ids of its logits' rows are kept from first_draft on in this half (most_drafts()).
  int64_t half = 0, first_draft = 0;
};

// Large because a step's inputs, outputs and graphs each have a separate buffer. Methods behave like those of
// Executor (executor.h) with the same names.
class GpuRank final : public PageCopier {
 public:
  GpuRank(const RankSetup& setup, int rank);
  ~GpuRank() override;

  // Loads this rank's shard and allocates the memory that steps need. `heap`: shared by all ranks, null if
  // this process has only one rank; it and setup.others must outlive this object.
  Status load(const RankSetup& setup, const PeerHeap* heap, const ProgressSink& progress);
  // Runs steps of doubling sizes and of every decode size, and samples in every way, without the other ranks
  // (DeviceCommunicator::rehearse()). Call after load(). Does nothing if there is only one rank.
  Status rehearse();
  // Records a graph for each decode size, largest first because all graphs share the model's scratch memory.
  // Call after load() has returned on all ranks; all of them must call it, in parallel.
  Status record_graphs(const EngineConfig& flags);

  // Between steps: the three parts of RankGroup::reload(), each for all ranks before the next. The second and
  // the third keep an error as failure(). The third records graphs whose arguments depend on weights.
  Status check_weights(const Checkpoint& checkpoint);
  Status replace_weights(const Checkpoint& checkpoint, const ProgressSink& progress);
  Status replace_graphs(const EngineConfig& flags);

  Status execute_step(const Batch& batch, const GpuStep& step);
  // The rows that a batch has on the device, padded to a decode size if it decodes.
  GpuStep step_of(const Batch& batch) const;
  bool wants_logits() const { return wants_logits_; }
  float* logits();  // of the group's first rank
  Status set_masked_ids(std::span<const int32_t> ids);
  // all_greedy: whether is_plain_greedy() holds for all rows of the step, those of other groups too.
  Status start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                      std::span<const uint32_t> allowed, std::span<const int32_t> logprob_ids,
                      bool all_greedy);
  Status accept_drafts();
  Status take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs);
  // Waits for the draft model's passes so far that keep ids in the same half as rows[0]. `rows`: indices
  // among the kept ids of both halves.
  Status take_draft_ids(std::span<const int64_t> rows, std::span<int32_t> ids);
  // How many ids of the draft model's rows are kept in each of two halves: twice the rows of logits of a
  // step, and half as many for the rows that passes have only because they widen.
  int64_t most_drafts() const { return has_draft() ? 3 * max_logit_rows_ : 0; }
  // Returns what an id in a batch or an edit means that refers to a kept id.
  int32_t kept_draft(int64_t row) const { return ~static_cast<int32_t>(max_logit_rows_ + row); }
  // Whether a pass of the draft model runs as a decode step, which computes the logits of all its rows.
  bool widens(const Batch& batch) const;
  // The logits of so few rows take about as long as those of one.
  int64_t most_widened_rows() const { return std::min<int64_t>(64, max_logit_rows_); }
  Status failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  // Returns OK, or why one of this rank's groups has failed (DeviceCommunicator::failure()).
  Status group_failure() const;
  // Beside the steps; `staging` is pinned. Callable from any thread, by one at a time.
  Status start_pages(std::span<const StagedPage> pages, uint8_t* staging, CopyDirection direction) override;
  Status start_state(int32_t slot, int64_t first, std::span<uint8_t> staging,
                     CopyDirection direction) override;
  Status finish_copies(const char* what) override;
  Status copy_states(std::span<const StateCopy> copies);
  Status finish_steps() { return wait(step_); }
  Status finish_steps_before_last();
  // After finish_steps(), on all ranks together. Any error is permanent.
  Status rebalance_experts();

  Rank& rank() { return rank_; }
  const Rank& rank() const { return rank_; }

 private:
  struct GraphKey {
    int64_t rows = 0;
    bool shares_pages = false;
    BatchModel model = BatchModel::kTarget;
    bool chains = false;
    auto operator<=>(const GraphKey&) const = default;
  };
  // What differs between the target and the draft model.
  struct ModelShape {
    int64_t vocab_size = 0;
    Shard vocab;                    // the ids whose logits this rank computes
    bool stores_keys_apart = true;  // attention never fuses rope, so one graph of each size is enough
  };
  Status allocate(const RankSetup& setup);
  Status allocate_logits(const RankSetup& setup);
  Status allocate_host_buffers(int64_t sample_bytes, int64_t edit_bytes);
  Status make_side_stream();
  Status rehearse_steps(BatchModel model, int64_t most);
  Status rehearse_sampling(int64_t num_rows, bool accepts);
  Status rehearse_copies();
  void enqueue_pages(const KvCache& kv, KvLayers layers, std::span<const StagedPage> pages, uint8_t* staging,
                     CopyDirection direction);
  Status make_groups(const RankSetup& setup, const PeerHeap* heap);
  Status make_groups_of(BatchModel model, const RankSetup& setup, const PeerHeap* heap);
  // RankContext::device_group and device_world for a model; shared_head: all ranks, if they share LM heads.
  struct Groups {
    std::unique_ptr<DeviceCommunicator> attention, world, shared_head;
    std::array<DeviceCommunicator*, 3> all() const {
      return {attention.get(), world.get(), shared_head.get()};
    }
    DeviceCommunicator* head() const { return shared_head != nullptr ? shared_head.get() : attention.get(); }
  };
  const Groups& groups_of(BatchModel model) const { return groups_[static_cast<size_t>(model)]; }
  const DeviceCommunicator& last_head() const { return *groups_of(last_model_).head(); }
  // Whether this rank computes the logits of a part of the vocabulary; and whether it computes those of all
  // groups' rows.
  bool shares_vocab() const { return groups_of(BatchModel::kTarget).head() != nullptr; }
  bool has_all_rows() const { return groups_of(BatchModel::kTarget).shared_head != nullptr; }
  // How many rows the ranks that share a head exchange if this group has num_rows: as many for each group.
  int64_t exchanged_rows(int64_t num_rows) const { return has_all_rows() ? group_rows_ : num_rows; }
  bool has_peers() const { return shares_vocab() || groups_of(BatchModel::kTarget).world != nullptr; }
  void rehearse_groups(bool on);
  DeviceBatch put(const Batch& batch, int64_t num_rows, bool shares_pages);
  int64_t padded_rows(const Batch& batch) const;
  std::vector<GraphKey> decode_graphs() const;
  void add_graphs(BatchModel model, int64_t num_rows, std::vector<GraphKey>& graphs) const;
  const Graph* graph_of(const GpuStep& step) const;
  Status run_batch(const DeviceBatch& batch, BatchModel model, bool chains);
  bool has_draft() const { return draft_shape_.vocab_size > 0; }
  const ModelShape& shape_of(BatchModel model) const { return shapes_[static_cast<size_t>(model)]; }
  const ModelShape& last_shape() const { return shape_of(last_model_); }
  const ModelConfig& config() const { return rank_.config(); }
  int64_t page_size() const { return rank_.kv().page_size(); }
  int64_t num_window_pages() const { return rank_.kv().num_pages(KvLayers::kWindow); }
  int64_t expert_bytes(int64_t num_rows) const {
    return config().num_layers * num_rows * config().top_k * int64_t{sizeof(int32_t)};
  }
  Status take_experts(const Batch& batch, int64_t num_rows);
  Status take_logits(int64_t num_rows);
  void gather_logits(int64_t num_rows);
  void sample_rows(SampleRowsArgs args);
  void choose_draft_ids(int64_t num_rows, const GpuStep& step);
  Status put_target_ids(std::span<const int32_t> masked);
  void run_copies(std::span<const StateCopy> copies);
  int64_t params_bytes() const { return max_logit_rows_ * int64_t{sizeof(SampleRowParams)}; }
  SampledRow* sampled_rows() { return reinterpret_cast<SampledRow*>(sampled_.data() + params_bytes()); }
  ChosenTokens chosen() { return {&sampled_rows()->token_id, int64_t{sizeof(SampledRow) / sizeof(int32_t)}}; }
  Status wait(const std::string& what);
  Status synchronize(const Event& event, const std::string& what);
  Status keep_failure(const Status& status);
  Status fail_if(const Status& status);

  std::unique_ptr<PlacedMemory> places_;  // of the weights and the model's scratch memory
  Rank rank_;
  SideStream side_;  // of stream_; empty without a use for it
  Stream stream_;
  NcclComm* nccl_ = nullptr;          // null unless ranks are in other processes
  NcclComm* limits_waits_ = nullptr;  // nccl_ once ranks exchange data; waits for the GPU are HostWaits
  Groups groups_[2];                  // by BatchModel
  BatchStage stage_;
  DraftShape draft_shape_;
  ModelShape shapes_[2];                         // by BatchModel
  BatchModel last_model_ = BatchModel::kTarget;  // of the last step
  // Of the last step's model, with room for either.
  Buffer logits_;  // device: [max_logit_rows, V] f32; if ranks share a vocabulary, only after gather_logits()
  Buffer part_;    // device: [rows, ids of this rank] f32 (LmHead); only if ranks share a vocabulary
  int64_t group_rows_ = 0;  // GpuStep::logit_rows of the last step
  Buffer host_logits_;      // a pinned copy of logits_; only if wants_logits_, on the group's first rank
  Buffer sampled_;          // device: params, then rows, then 2 * most_drafts() rows of the draft model
  Buffer edits_;            // device: LogitEdits
  Buffer allowed_;          // device: SampleRowsArgs::allowed
  Buffer logprob_ids_;      // device: SampleRowsArgs::logprob_ids
  // Host buffers of one step; two steps may be in flight.
  struct HostBuffers {
    Event staged;                     // the batch has been copied
    Event sampled;                    // the tokens have arrived
    std::string step;                 // description of the step whose logits were sampled
    Buffer samples;                   // pinned: params, then rows
    Buffer edits, allowed;            // pinned
    Buffer logprob_ids, id_logprobs;  // pinned
  };
  HostBuffers host_buffers_[2];
  uint64_t num_steps_ = 0, num_sampled_ = 0, num_taken_ = 0;
  Buffer draft_rows_;              // pinned: the draft model's rows
  Event drafted_[2];               // its last pass of each half is done, and its rows have arrived
  Buffer target_ids_;              // device: [V of the draft model] target_id(), or -1 if it is masked
  Buffer masked_;                  // device: SampleRowsArgs::masked, or empty
  Buffer experts_, host_experts_;  // Batch::routed_experts of the last step, with padding; host_experts_
                                   // is pinned
  int64_t max_logit_rows_ = 0;
  std::vector<int64_t> buckets_;  // decode_buckets()
  std::map<GraphKey, Graph> graphs_;
  std::string step_ = "loading";  // description of the last step, for errors
  const bool wants_logits_;
  Stream page_stream_;  // for KV pages and states that other threads read and write
  mutable std::mutex mutex_;
  Status failure_;
};

// A GPU copies 4 MiB of pages in about the time of one page, if it has to leave another process's kernels
// first.
constexpr int64_t kPageBatchBytes = 4 << 20;
// Makes the pages of each data-parallel group, with pinned staging for a batch. Call after load() of all
// ranks, which are borrowed.
Result<std::vector<std::unique_ptr<GroupPages>>> make_group_pages(
    std::span<const std::unique_ptr<GpuRank>> ranks);
// Connects the ranks' threads, for weights that move between GPUs through a part of the heap. Call before
// load().
Result<std::unique_ptr<Job>> connect_movers(std::span<const std::unique_ptr<GpuRank>> ranks,
                                            const RankSetup& setup, const PeerHeap& heap);

}  // namespace fp4moe
