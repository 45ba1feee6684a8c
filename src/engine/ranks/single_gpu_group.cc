#include "engine/ranks/single_gpu_group.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>

#include "base/check.h"
#include "base/log.h"
#include "device/device_memory.h"
#include "device/event.h"
#include "device/graph.h"
#include "device/pinned_memory.h"
#include "device/upload_ring.h"
#include "engine/output/logit_edits.h"
#include "engine/ranks/batch_stage.h"
#include "engine/startup/memory_plan.h"
#include "kernels/device_copy.h"

namespace fp4moe {
namespace {

// A device error is permanent: every later CUDA call of the process returns it too.
bool is_sticky(const Status& status) { return status.code() == StatusCode::kInternal; }

// Large because a step's inputs, outputs and graphs each have a buffer of their own.
class SingleGpuGroup final : public SingleRankGroup {
 public:
  explicit SingleGpuGroup(const RankSetup& setup)
      : SingleRankGroup(setup), wants_logits_(setup.options.wants_logits) {}
  ~SingleGpuGroup() override {
    if (stream_.handle() == nullptr) return;
    const StreamScope scope(stream_);
    static_cast<void>(wait(step_));  // enqueued work uses this object's memory
  }

  Status load(const RankSetup& setup);

  Status execute_step(std::span<const Batch> groups) override;
  float* logits() override {
    FP4MOE_CHECK(wants_logits_, "these logits stay on the GPU");
    return host_logits_.as<float>();
  }
  Status supports_routed_experts() const override { return {}; }
  bool samples() const override { return true; }
  Status set_masked_ids(std::span<const int32_t> ids) override;
  Status start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                      std::span<const uint32_t> allowed) override;
  Status take_sampled(std::span<SampledRow> out) override;
  Status failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  Status read_page(int group, int32_t page, int64_t num_tokens, uint8_t* canonical) override;
  Status write_page(int group, int32_t page, int64_t num_tokens, const uint8_t* canonical) override;
  Status finish_steps() override { return wait(step_); }

 private:
  Status allocate(const RankSetup& setup);
  Status record_graphs(const EngineConfig& flags);
  DeviceBatch put(const Batch& batch, int64_t num_rows);
  Status run_batch(const DeviceBatch& batch);
  int64_t expert_bytes(int64_t num_rows) const {
    return config().num_layers * num_rows * config().top_k * int64_t{sizeof(int32_t)};
  }
  Status take_experts(const Batch& batch, int64_t num_rows);
  Status copy_page(KvPageCopyArgs args, const char* what);
  int64_t params_bytes() const { return max_logit_rows_ * int64_t{sizeof(SampleRowParams)}; }
  SampledRow* sampled_rows() { return reinterpret_cast<SampledRow*>(sampled_.data() + params_bytes()); }
  Status wait(const std::string& what);
  Status keep_failure(const Status& status);

  Stream stream_;
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

// ---- loading --------------------------------------------------------------------------------------

Status SingleGpuGroup::load(const RankSetup& setup) {
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, DeviceContext::of(setup.plan.gpu()));
  const DeviceScope on_gpu(*gpu);
  FP4MOE_ASSIGN_OR_RETURN(stream_, Stream::make());
  {
    const UploadScope uploads(rank_.pool());
    const StreamScope scope(stream_);
    FP4MOE_RETURN_IF_ERROR(prepare_cuda_dense_ops());
    FP4MOE_RETURN_IF_ERROR(rank_.load(setup, setup.flags.progress_sink));
    FP4MOE_RETURN_IF_ERROR(wait("loading"));
  }
  FP4MOE_RETURN_IF_ERROR(allocate(setup));
  if (setup.flags.disable_cuda_graph || cuda_sync_is_on()) return {};
  return record_graphs(setup.flags);
}

Status SingleGpuGroup::allocate(const RankSetup& setup) {
  const RankGroupOptions& options = setup.options;
  max_logit_rows_ = options.max_logit_rows;
  const int64_t context = options.context_length > 0 ? options.context_length : num_kv_pages() * page_size();
  const StageLimits limits{.max_rows = options.max_batch_tokens,
                           .max_sequences = std::max<int64_t>(options.max_logit_rows, 1),
                           .max_logit_rows = options.max_logit_rows,
                           .max_pages = (context + page_size() - 1) / page_size()};
  FP4MOE_ASSIGN_OR_RETURN(stage_, BatchStage::make(limits, pinned_memory(), device_memory()));
  const int64_t logit_bytes = max_logit_rows_ * config().vocab_size * int64_t{sizeof(float)};
  FP4MOE_ASSIGN_OR_RETURN(logits_, Buffer::make(logit_bytes, device_memory()));
  if (wants_logits_) {
    FP4MOE_ASSIGN_OR_RETURN(host_logits_, Buffer::make(logit_bytes, pinned_memory()));
  }
  const int64_t sample_bytes = max_logit_rows_ * int64_t{sizeof(SampleRowParams) + sizeof(SampledRow)};
  FP4MOE_ASSIGN_OR_RETURN(sampled_, Buffer::make(sample_bytes, device_memory()));
  const int64_t edit_bytes =
      max_logit_edits(max_logit_rows_, num_kv_pages() * page_size(), std::ssize(config().eos_token_ids)) *
      int64_t{sizeof(LogitEdit)};
  FP4MOE_ASSIGN_OR_RETURN(edits_, Buffer::make(edit_bytes, device_memory()));
  const int64_t mask_bytes = (config().vocab_size + 31) / 32 * int64_t{sizeof(uint32_t)};
  FP4MOE_ASSIGN_OR_RETURN(allowed_, Buffer::make(max_logit_rows_ * mask_bytes, device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(experts_, Buffer::make(expert_bytes(options.max_batch_tokens), device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(host_experts_, Buffer::make(experts_.num_bytes(), pinned_memory()));
  FP4MOE_ASSIGN_OR_RETURN(page_stream_, Stream::make());
  FP4MOE_ASSIGN_OR_RETURN(page_, Buffer::make(page_size() * kv_token_bytes(), pinned_memory()));
  for (HostBuffers& buffers : host_buffers_) {
    FP4MOE_ASSIGN_OR_RETURN(buffers.allowed, Buffer::make(max_logit_rows_ * mask_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.edits, Buffer::make(edit_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.samples, Buffer::make(sample_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.staged, Event::make());
    FP4MOE_ASSIGN_OR_RETURN(buffers.sampled, Event::make());
  }
  buckets_ = decode_buckets(max_logit_rows_, setup.flags.cuda_graph_bs);
  return {};
}

// A step that consists of padding only represents all steps of its size. It runs once, so that kernels and
// libraries make their first-use allocations, and is then recorded.
Status SingleGpuGroup::record_graphs(const EngineConfig& flags) {
  const auto started = std::chrono::steady_clock::now();
  FP4MOE_ASSIGN_OR_RETURN(const DeviceMemoryInfo before, device_memory_info(stream_.device().ordinal()));
  const int64_t largest = flags.cuda_graph_max_bs > 0 ? flags.cuda_graph_max_bs : buckets_.back();
  const StreamScope scope(stream_);
  for (auto size = buckets_.rbegin(); size != buckets_.rend(); ++size) {
    if (*size > largest) continue;
    const DeviceBatch batch = put({}, *size);
    FP4MOE_RETURN_IF_ERROR(run_batch(batch));
    FP4MOE_RETURN_IF_ERROR(wait("the first decode step of " + std::to_string(*size) + " rows"));
    Result<Graph> graph = Graph::capture(stream_, [&] { return run_batch(batch); });
    if (!graph.ok())
      return graph.status().with_context("CUDA graph of " + std::to_string(*size) +
                                         " decode rows (--disable-cuda-graph skips it)");
    graphs_.emplace(*size, std::move(*graph));
  }
  FP4MOE_ASSIGN_OR_RETURN(const DeviceMemoryInfo after, device_memory_info(stream_.device().ordinal()));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  char took[32];
  std::snprintf(took, sizeof took, "%.2f s", seconds.count());
  log_info("graphs     " + std::to_string(graphs_.size()) + " decode sizes up to " + std::to_string(largest) +
           " rows in " + took + ", " +
           size_string(std::max<int64_t>(0, before.free_bytes - after.free_bytes)));
  return {};
}

// ---- steps ----------------------------------------------------------------------------------------

Status SingleGpuGroup::execute_step(std::span<const Batch> groups) {
  FP4MOE_CHECK(groups.size() == 1, std::to_string(groups.size()) + " groups, 1 rank");
  FP4MOE_RETURN_IF_ERROR(failure());
  const Batch& batch = groups[0];
  const StreamScope scope(stream_);
  const Event& staged = host_buffers_[num_steps_ % 2].staged;
  if (const Status status = staged.synchronize(); !status.ok()) return wait(step_);
  const int64_t rows = std::ssize(batch.token_ids);
  const int64_t padded = is_decode(batch) ? bucket_for(buckets_, rows) : rows;
  const DeviceBatch on_device = put(batch, padded);
  host_buffers_[num_steps_++ % 2].staged.record(stream_);
  const auto graph = is_decode(batch) ? graphs_.find(padded) : graphs_.end();
  if (graph != graphs_.end()) {
    step_ = "the graph of " + std::to_string(padded) + " decode rows";
    graph->second.launch(stream_);
  } else {
    step_ = "a step of " + std::to_string(padded) + " rows";
    FP4MOE_RETURN_IF_ERROR(run_batch(on_device));
  }
  if (batch.routed_experts != nullptr) FP4MOE_RETURN_IF_ERROR(take_experts(batch, padded));
  if (!wants_logits_) return {};
  copy_async(host_logits_.data(), logits_.data(),
             std::ssize(batch.logit_rows) * config().vocab_size * int64_t{sizeof(float)});
  return wait(step_);
}

// Waits for the step; num_rows includes padding.
Status SingleGpuGroup::take_experts(const Batch& batch, int64_t num_rows) {
  copy_async(host_experts_.data(), experts_.data(), expert_bytes(num_rows));
  FP4MOE_RETURN_IF_ERROR(wait(step_));
  const int64_t t = std::ssize(batch.token_ids), k = config().top_k;
  for (const int64_t layer : rank_.model().expert_counters().layers()) {
    const int64_t rows = layer + 1 < config().num_layers ? t : std::ssize(batch.logit_rows);
    std::copy_n(host_experts_.as<int32_t>() + layer * num_rows * k, rows * k,
                batch.routed_experts + layer * t * k);
  }
  return {};
}

DeviceBatch SingleGpuGroup::put(const Batch& batch, int64_t num_rows) {
  DeviceBatch on_device = stage_.put(batch, num_rows);
  on_device.chosen = {&sampled_rows()->token_id, int64_t{sizeof(SampledRow) / sizeof(int32_t)}};
  return on_device;
}

Status SingleGpuGroup::run_batch(const DeviceBatch& on_device) {
  Batch batch;
  batch.device = &on_device;
  batch.routed_experts = experts_.as<int32_t>();
  const Status status = rank_.forward_on_rank(batch, logits_.as<float>());
  stream_.end_layers();
  return status;
}

// Waits for all enqueued work. Keeps a device error; execute_step() then refuses further steps.
Status SingleGpuGroup::wait(const std::string& what) {
  const Status status = stream_.synchronize();
  return status.ok() ? status : keep_failure(status.with_context("GPU, in " + what));
}

Status SingleGpuGroup::keep_failure(const Status& status) {
  if (!is_sticky(status)) return status;
  std::lock_guard lock(mutex_);
  failure_ = status;
  return status;
}

// ---- KV pages exchanged with other engines --------------------------------------------------------

Status SingleGpuGroup::read_page(int, int32_t page, int64_t num_tokens, uint8_t* canonical) {
  std::lock_guard lock(page_mutex_);
  FP4MOE_RETURN_IF_ERROR(
      copy_page(rank_.kv().page_copy(page, num_tokens, page_.data()), "reading a KV page"));
  std::copy_n(page_.data(), num_tokens * kv_token_bytes(), canonical);
  return {};
}

Status SingleGpuGroup::write_page(int, int32_t page, int64_t num_tokens, const uint8_t* canonical) {
  std::lock_guard lock(page_mutex_);
  std::copy_n(canonical, num_tokens * kv_token_bytes(), page_.data());
  KvPageCopyArgs args = rank_.kv().page_copy(page, num_tokens, page_.data());
  args.to_device = true;
  return copy_page(args, "writing a KV page");
}

Status SingleGpuGroup::copy_page(KvPageCopyArgs args, const char* what) {
  FP4MOE_RETURN_IF_ERROR(failure());
  const StreamScope scope(page_stream_);
  cuda_copy_kv_page()(args);
  const Status status = page_stream_.synchronize();
  return status.ok() ? status : keep_failure(status.with_context(std::string("GPU, in ") + what));
}

// ---- sampling -------------------------------------------------------------------------------------

Status SingleGpuGroup::set_masked_ids(std::span<const int32_t> ids) {
  std::vector<uint32_t> bits(ids.empty() ? 0 : static_cast<size_t>(config().vocab_size / 32 + 1));
  for (const int32_t id : ids) bits[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
  const auto num_bytes = static_cast<int64_t>(bits.size() * sizeof(uint32_t));
  FP4MOE_ASSIGN_OR_RETURN(masked_, Buffer::copy_of(bits.data(), num_bytes, stream_.device().memory()));
  return {};
}

Status SingleGpuGroup::start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                                    std::span<const uint32_t> allowed) {
  const auto edit_bytes = static_cast<int64_t>(edits.size_bytes());
  FP4MOE_CHECK(
      std::ssize(rows) <= max_logit_rows_ && edit_bytes <= edits_.num_bytes() &&
          static_cast<int64_t>(allowed.size_bytes()) <= allowed_.num_bytes() && num_sampled_ - num_taken_ < 2,
      std::to_string(rows.size()) + " rows to sample, with " + std::to_string(edits.size()) + " edits");
  const StreamScope scope(stream_);
  HostBuffers& buffers = host_buffers_[num_sampled_++ % 2];
  const bool all_greedy = std::all_of(rows.begin(), rows.end(), is_plain_greedy);
  if (!all_greedy) {
    std::copy(rows.begin(), rows.end(), buffers.samples.as<SampleRowParams>());
    copy_async(sampled_.data(), buffers.samples.data(), std::ssize(rows) * int64_t{sizeof(SampleRowParams)});
  }
  if (!edits.empty()) {
    std::copy(edits.begin(), edits.end(), buffers.edits.as<LogitEdit>());
    copy_async(edits_.data(), buffers.edits.data(), edit_bytes);
  }
  if (!allowed.empty()) {
    std::copy(allowed.begin(), allowed.end(), buffers.allowed.as<uint32_t>());
    copy_async(allowed_.data(), buffers.allowed.data(), static_cast<int64_t>(allowed.size_bytes()));
  }
  cuda_sample_rows()({.logits = logits_.as<float>(),
                      .num_rows = std::ssize(rows),
                      .vocab_size = config().vocab_size,
                      .row_stride = config().vocab_size,
                      .masked = masked_.as<uint32_t>(),
                      .params = sampled_.as<SampleRowParams>(),
                      .edits = edits_.as<LogitEdit>(),
                      .allowed = allowed_.as<uint32_t>(),
                      .all_greedy = all_greedy,
                      .out = sampled_rows(),
                      .copy = reinterpret_cast<SampledRow*>(buffers.samples.data() + params_bytes())});
  buffers.step = step_;
  buffers.sampled.record(stream_);
  return {};
}

Status SingleGpuGroup::take_sampled(std::span<SampledRow> out) {
  FP4MOE_CHECK(num_taken_ < num_sampled_, "no rows were sampled");
  const HostBuffers& buffers = host_buffers_[num_taken_++ % 2];
  const Status status = buffers.sampled.synchronize();
  if (const Status asked = stream_.take_failure(); status.ok() && !asked.ok())
    return keep_failure(asked.with_context("GPU, in " + buffers.step));
  if (!status.ok()) return wait(buffers.step + " or its sampling");
  const auto* rows = reinterpret_cast<const SampledRow*>(buffers.samples.data() + params_bytes());
  std::copy_n(rows, out.size(), out.begin());
  return {};
}

}  // namespace

Result<std::unique_ptr<RankGroup>> make_single_gpu_group(const RankSetup& setup) {
  auto rank = std::make_unique<SingleGpuGroup>(setup);
  const Status loaded = rank->load(setup);
  if (loaded.code() == StatusCode::kDoesNotFit)
    return does_not_fit(loaded.message() + "; --mem-fraction-static below " +
                        std::to_string(setup.flags.mem_fraction_static).substr(0, 4) +
                        " leaves more GPU memory for other processes and unplanned allocations");
  FP4MOE_RETURN_IF_ERROR(loaded);
  return std::unique_ptr<RankGroup>(std::move(rank));
}

}  // namespace fp4moe
