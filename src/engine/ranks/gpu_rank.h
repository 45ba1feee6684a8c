// GpuRank: one rank of a model on a GPU. Steps are enqueued on one stream, decode steps of a recorded size as
// one graph launch, and tokens are sampled on the device. With several ranks each has a thread
// (gpu_group.cc), and all enqueue the same steps.
#pragma once

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
#include "device/stream.h"
#include "engine/ranks/batch_stage.h"
#include "engine/ranks/executor.h"
#include "engine/ranks/rank.h"

namespace fp4moe {

// What all ranks of a step know about the groups' batches.
struct GpuStep {
  bool decodes = true;               // all groups: the ranks run the graphs of the same size
  int64_t rows = 0, logit_rows = 0;  // of the group that has most, padded
};

// Large because a step's inputs, outputs and graphs each have a buffer of their own. Calls are as those of
// Executor (executor.h) with the same names.
class GpuRank {
 public:
  GpuRank(const RankSetup& setup, int rank);
  ~GpuRank();

  // Loads this rank's shard and allocates what steps need. `heap`: of all ranks, null if there is one; it
  // must outlive this object.
  Status load(const RankSetup& setup, const PeerHeap* heap, const ProgressSink& progress);
  // Runs steps of all sizes and ways to sample once, without the other ranks
  // (DeviceCommunicator::rehearse()). After load(); nothing with one rank.
  Status rehearse();
  // Records a graph for each decode size, largest first: all graphs share the model's scratch memory. After
  // load() on all ranks; all of them must call it, in parallel.
  Status record_graphs(const EngineConfig& flags);

  Status execute_step(const Batch& batch, const GpuStep& step);
  // The rows that a batch has on the device, padded to a decode size if it decodes.
  GpuStep step_of(const Batch& batch) const;
  bool wants_logits() const { return wants_logits_; }
  float* logits();
  Status set_masked_ids(std::span<const int32_t> ids);
  Status start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                      std::span<const uint32_t> allowed);
  Status take_sampled(std::span<SampledRow> out);
  Status failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  // Whether this rank has waited in vain for another one.
  Status group_failure() const;
  Status read_page(int32_t page, int64_t num_tokens, uint8_t* canonical);
  Status write_page(int32_t page, int64_t num_tokens, const uint8_t* canonical);
  Status finish_steps() { return wait(step_); }

  Rank& rank() { return rank_; }
  const Rank& rank() const { return rank_; }

 private:
  Status allocate(const RankSetup& setup);
  Status rehearse_sampling(int64_t num_rows);
  Status make_groups(const RankSetup& setup, const PeerHeap& heap);
  bool has_peers() const { return group_ != nullptr || world_ != nullptr; }
  void rehearse_groups(bool on);
  DeviceBatch put(const Batch& batch, int64_t num_rows);
  int64_t padded_rows(const Batch& batch) const;
  Status run_batch(const DeviceBatch& batch);
  const ModelConfig& config() const { return rank_.model().config(); }
  int64_t page_size() const { return rank_.kv().page_size(); }
  int64_t kv_token_bytes() const { return rank_.kv().token_bytes(); }
  int64_t expert_bytes(int64_t num_rows) const {
    return config().num_layers * num_rows * config().top_k * int64_t{sizeof(int32_t)};
  }
  Status take_experts(const Batch& batch, int64_t num_rows);
  Status copy_page(KvPageCopyArgs args, const char* what);
  int64_t params_bytes() const { return max_logit_rows_ * int64_t{sizeof(SampleRowParams)}; }
  SampledRow* sampled_rows() { return reinterpret_cast<SampledRow*>(sampled_.data() + params_bytes()); }
  Status wait(const std::string& what);
  Status keep_failure(const Status& status);

  Rank rank_;
  Stream stream_;
  std::unique_ptr<DeviceCommunicator> group_, world_;  // RankContext::device_group, device_world
  BatchStage stage_;
  Buffer logits_;       // device: [max_logit_rows, V] f32
  Buffer host_logits_;  // the same, pinned, if wants_logits_
  Buffer sampled_;      // device: params, then rows
  Buffer edits_;        // device: LogitEdits
  Buffer allowed_;      // device: SampleRowsArgs::allowed
  // Host buffers of one step; two steps may be in flight.
  struct HostBuffers {
    Event staged;           // the batch has been copied
    Event sampled;          // the tokens have arrived
    std::string step;       // description of the step that sampled them
    Buffer samples;         // pinned: params, then rows
    Buffer edits, allowed;  // pinned
  };
  HostBuffers host_buffers_[2];
  uint64_t num_steps_ = 0, num_sampled_ = 0, num_taken_ = 0;
  Buffer masked_;                  // device: SampleRowsArgs::masked, or empty
  Buffer experts_, host_experts_;  // Batch::routed_experts of the last step, with padding; the second is
                                   // pinned
  int64_t max_logit_rows_ = 0;
  std::vector<int64_t> buckets_;  // of decode steps
  std::map<int64_t, Graph> graphs_;
  std::string step_ = "loading";  // description of the last step, for errors
  const bool wants_logits_;
  // For KV pages that other threads read and write.
  std::mutex page_mutex_;
  Stream page_stream_;
  Buffer page_;  // pinned, in canonical form
  mutable std::mutex mutex_;
  Status failure_;
};

}  // namespace fp4moe
