#include "engine/ranks/gpu_rank.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "device/device_info.h"
#include "device/device_memory.h"
#include "device/pinned_memory.h"
#include "device/upload_ring.h"
#include "engine/output/logit_edits.h"
#include "engine/startup/memory_plan.h"
#include "kernels/device_copy.h"
#include "model/lm_head.h"
#include "model/resolve_flags.h"

namespace fp4moe {
namespace {

// Returns whether the error is permanent. A device error is, because every later CUDA call in the process
// returns it too; so is the failure of a group.
bool is_permanent(const Status& status) {
  return status.code() == StatusCode::kInternal || status.code() == StatusCode::kDeadline;
}

constexpr int kStreams = 3;  // of a rank: stream_, page_stream_ and side_

}  // namespace

GpuRank::GpuRank(const RankSetup& setup, int rank)
    : rank_(setup, rank, nullptr), wants_logits_(setup.options.wants_logits) {}

GpuRank::~GpuRank() {
  if (stream_.handle() == nullptr) return;
  const StreamScope scope(stream_);
  static_cast<void>(wait(step_));  // enqueued work uses this object's memory
}

float* GpuRank::logits() {
  FP4MOE_CHECK(host_logits_.data() != nullptr, "these logits stay on the GPU");
  return host_logits_.as<float>();
}

// ---- loading --------------------------------------------------------------------------------------

Status GpuRank::load(const RankSetup& setup, const PeerHeap* heap, const ProgressSink& progress) {
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, DeviceContext::of(gpu_of_rank(rank_.layout().rank)));
  const DeviceScope on_gpu(*gpu);
  FP4MOE_ASSIGN_OR_RETURN(stream_, Stream::make());
  {
    const UploadScope uploads(rank_.pool());
    const StreamScope scope(stream_);
    FP4MOE_RETURN_IF_ERROR(prepare_cuda_dense_ops());
    if (heap != nullptr) FP4MOE_RETURN_IF_ERROR(make_groups(setup, *heap));
    FP4MOE_RETURN_IF_ERROR(rank_.load(setup, progress));
    FP4MOE_RETURN_IF_ERROR(wait("loading"));
  }
  FP4MOE_RETURN_IF_ERROR(make_side_stream());
  return allocate(setup);
}

// Ranks that exchange rows run their shared experts while the rows are in flight and need no side stream. Nor
// is there one if the streams of a GPU's ranks would share hardware queues: a kernel that waits for another
// rank's kernel could be in front of that kernel. The bits are the same without a side stream.
Status GpuRank::make_side_stream() {
  const bool fits = ranks_per_gpu() * kStreams <= kHardwareQueues;
  if (config().shared_intermediate_size == 0 || world_ != nullptr || !fits) return {};
  FP4MOE_ASSIGN_OR_RETURN(side_, SideStream::make());
  stream_.set_side(&side_);
  return {};
}

Status GpuRank::make_groups(const RankSetup& setup, const PeerHeap& heap) {
  const RankLayout& layout = rank_.layout();
  const CommMemory& memory = setup.memory;
  const auto timeout = comm_timeout(setup.flags);
  if (const int size = layout.attention_tp(); size > 1) {
    FP4MOE_ASSIGN_OR_RETURN(
        group_, DeviceCommunicator::make(heap, layout.dp_rank() * size, size, layout.attention_rank(),
                                         memory.device_attention, timeout));
    if (setup.flags.tp_reduce_dtype == "bfloat16") group_->send_bf16_partials();
  }
  if (memory.a2a_bytes > 0) {
    FP4MOE_ASSIGN_OR_RETURN(
        world_, DeviceCommunicator::make(heap, 0, layout.tp, layout.rank, memory.device_world, timeout));
  }
  rank_.set_device_groups(group_.get(), world_.get());
  stream_.set_has_peers();
  return {};
}

void GpuRank::rehearse_groups(bool on) {
  for (DeviceCommunicator* group : {group_.get(), world_.get()})
    if (group != nullptr) group->rehearse(on);
}

Status GpuRank::group_failure() const {
  for (const DeviceCommunicator* group : {group_.get(), world_.get()})
    if (group != nullptr) FP4MOE_RETURN_IF_ERROR(group->failure());
  return {};
}

Status GpuRank::allocate(const RankSetup& setup) {
  const RankGroupOptions& options = setup.options;
  max_logit_rows_ = options.max_logit_rows / rank_.layout().dp;
  const int64_t per_request = rows_per_request(setup.flags);
  const int64_t pool_tokens = rank_.kv().num_pages() * page_size();
  const int64_t context = options.context_length > 0 ? options.context_length : pool_tokens;
  const StageLimits limits{.max_rows = options.max_batch_tokens,
                           .max_sequences = std::max<int64_t>(max_logit_rows_, 1),
                           .max_logit_rows = max_logit_rows_,
                           .rows_per_request = per_request,
                           .max_pages = (context + page_size() - 1) / page_size(),
                           .has_window_pages = num_window_pages() > 0};
  FP4MOE_ASSIGN_OR_RETURN(stage_, BatchStage::make(limits, pinned_memory(), device_memory()));
  const int64_t logit_bytes = max_logit_rows_ * config().vocab_size * int64_t{sizeof(float)};
  FP4MOE_ASSIGN_OR_RETURN(logits_, Buffer::make(logit_bytes, device_memory()));
  const RankLayout& layout = rank_.layout();
  vocab_ = vocab_shard(config().vocab_size, layout.attention_tp(), layout.attention_rank());
  if (group_ != nullptr) {
    const int64_t part_bytes = max_logit_rows_ * vocab_.count * int64_t{sizeof(float)};
    FP4MOE_ASSIGN_OR_RETURN(part_, Buffer::make(part_bytes, device_memory()));
  }
  if (wants_logits_ && layout.attention_rank() == 0) {
    FP4MOE_ASSIGN_OR_RETURN(host_logits_, Buffer::make(logit_bytes, pinned_memory()));
  }
  const int64_t sample_bytes = max_logit_rows_ * int64_t{sizeof(SampleRowParams) + sizeof(SampledRow)};
  FP4MOE_ASSIGN_OR_RETURN(sampled_, Buffer::make(sample_bytes, device_memory()));
  const int64_t edit_bytes =
      max_logit_edits(max_logit_rows_, pool_tokens * per_request, std::ssize(config().eos_token_ids)) *
      int64_t{sizeof(LogitEdit)};
  FP4MOE_ASSIGN_OR_RETURN(edits_, Buffer::make(edit_bytes, device_memory()));
  const int64_t mask_bytes = (config().vocab_size + 31) / 32 * int64_t{sizeof(uint32_t)};
  FP4MOE_ASSIGN_OR_RETURN(allowed_, Buffer::make(max_logit_rows_ * mask_bytes, device_memory()));
  const int64_t id_bytes = max_logit_rows_ * SamplingParams::kMaxLogprobIds * int64_t{sizeof(int32_t)};
  FP4MOE_ASSIGN_OR_RETURN(logprob_ids_, Buffer::make(id_bytes, device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(experts_, Buffer::make(expert_bytes(options.max_batch_tokens), device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(host_experts_, Buffer::make(experts_.num_bytes(), pinned_memory()));
  FP4MOE_ASSIGN_OR_RETURN(page_stream_, Stream::make());
  const int64_t most_bytes =
      std::max(page_bytes(0, page_size()), page_bytes({0, KvLayers::kWindow}, page_size()));
  FP4MOE_ASSIGN_OR_RETURN(page_, Buffer::make(most_bytes, pinned_memory()));
  for (HostBuffers& buffers : host_buffers_) {
    FP4MOE_ASSIGN_OR_RETURN(buffers.allowed, Buffer::make(max_logit_rows_ * mask_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.edits, Buffer::make(edit_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.logprob_ids, Buffer::make(id_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.id_logprobs, Buffer::make(id_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.samples, Buffer::make(sample_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.staged, Event::make());
    FP4MOE_ASSIGN_OR_RETURN(buffers.sampled, Event::make());
  }
  buckets_ = decode_buckets(std::max<int64_t>(max_logit_rows_ / per_request, 1), setup.flags.cuda_graph_bs,
                            per_request);
  stores_keys_apart_ = setup.flags.enable_deterministic_inference || config().mla.kv_lora_rank > 0;
  return {};
}

// The graphs to record, largest first. Steps without drafts have at most a row for each request.
std::vector<GpuRank::GraphKey> GpuRank::decode_graphs() const {
  const int64_t per_request = stage_.limits().rows_per_request;
  const int64_t largest_plain =
      stores_keys_apart_ ? max_logit_rows_ : bucket_for(buckets_, max_logit_rows_ / per_request);
  std::vector<GraphKey> graphs;
  for (auto rows = buckets_.rbegin(); rows != buckets_.rend(); ++rows) {
    if (!stores_keys_apart_ && per_request > 1 && *rows > 1) graphs.push_back({*rows, true});
    if (*rows <= largest_plain) graphs.push_back({*rows, false});
  }
  return graphs;
}

// Runs steps of doubling sizes, so that each kernel and each tactic of a layer runs for at least one of them.
// The KV pages that these steps write to do not hold any request's tokens yet.
Status GpuRank::rehearse() {
  if (!has_peers()) return {};
  rehearse_groups(true);
  const int64_t num_pages = std::min(stage_.limits().max_pages, rank_.kv().num_pages());
  const int64_t most = std::min(stage_.limits().max_rows, num_pages * page_size());
  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<int32_t> window_pages(num_window_pages() > 0 ? pages.size() : 0);  // all of them page 0
  for (int64_t rows = 1;; rows = std::min(2 * rows, most)) {
    const std::vector<int32_t> ids(static_cast<size_t>(rows));
    std::vector<int64_t> positions(ids.size()),
        logit_rows(static_cast<size_t>(std::min(rows, max_logit_rows_)));
    std::iota(positions.begin(), positions.end(), 0);
    std::iota(logit_rows.begin(), logit_rows.end(), 0);
    const auto count = static_cast<size_t>((rows + page_size() - 1) / page_size());
    const SequenceRows sequence{0, rows, 0, std::span(pages).first(count),
                                std::span(window_pages).first(std::min(count, window_pages.size()))};
    const Batch batch{ids, positions, {&sequence, 1}, logit_rows};
    FP4MOE_RETURN_IF_ERROR(execute_step(batch, step_of(batch)));
    FP4MOE_RETURN_IF_ERROR(rehearse_sampling(std::ssize(logit_rows)));
    if (rows == most) break;
  }
  const StreamScope scope(stream_);
  for (const auto& [rows, shares_pages] : decode_graphs()) {
    FP4MOE_RETURN_IF_ERROR(run_batch(put({}, rows, shares_pages)));
    FP4MOE_RETURN_IF_ERROR(wait("the rehearsal of " + std::to_string(rows) + " decode rows"));
  }
  rehearse_groups(false);
  return wait("the rehearsal");
}

Status GpuRank::rehearse_sampling(int64_t num_rows) {
  for (const bool greedy : {true, false}) {
    SampleRowParams params;
    params.temperature = greedy ? 0 : 1;
    const std::vector<SampleRowParams> rows(static_cast<size_t>(num_rows), params);
    std::vector<SampledRow> sampled(rows.size());
    FP4MOE_RETURN_IF_ERROR(start_sample(rows, {}, {}, {}));
    FP4MOE_RETURN_IF_ERROR(take_sampled(sampled, {}));
  }
  return {};
}

// For each size, records a step that consists only of padding; its graph serves all steps of that size. The
// step first runs once, so that kernels and libraries make their first-use allocations.
Status GpuRank::record_graphs(const EngineConfig& flags) {
  if (flags.disable_cuda_graph || cuda_sync_is_on()) return {};
  const auto started = std::chrono::steady_clock::now();
  FP4MOE_ASSIGN_OR_RETURN(const DeviceMemoryInfo before, device_memory_info(stream_.device().ordinal()));
  const int64_t largest = flags.cuda_graph_max_bs > 0
                              ? flags.cuda_graph_max_bs * stage_.limits().rows_per_request
                              : buckets_.back();
  const StreamScope scope(stream_);
  for (const GraphKey& key : decode_graphs()) {
    if (key.rows > largest) continue;
    const DeviceBatch batch = put({}, key.rows, key.shares_pages);
    if (!has_peers()) FP4MOE_RETURN_IF_ERROR(run_batch(batch));  // otherwise rehearse() has run it
    FP4MOE_RETURN_IF_ERROR(wait("the first decode step of " + std::to_string(key.rows) + " rows"));
    Result<Graph> graph = Graph::capture(stream_, [&] { return run_batch(batch); });
    if (!graph.ok())
      return graph.status().with_context("CUDA graph of " + std::to_string(key.rows) +
                                         " decode rows (--disable-cuda-graph skips recording graphs)");
    graphs_.emplace(key, std::move(*graph));
  }
  FP4MOE_ASSIGN_OR_RETURN(const DeviceMemoryInfo after, device_memory_info(stream_.device().ordinal()));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  char took[32];
  std::snprintf(took, sizeof took, "%.2f s", seconds.count());
  FP4MOE_RETURN_IF_ERROR(wait("recording graphs"));
  if (rank_.layout().rank != 0) return {};  // rank 0 logs this line for all
  log_info("graphs     " + std::to_string(graphs_.size()) + " of decode steps of up to " +
           std::to_string(largest) + " rows in " + took + ", " +
           size_string(std::max<int64_t>(0, before.free_bytes - after.free_bytes)));
  return {};
}

// ---- steps ----------------------------------------------------------------------------------------

int64_t GpuRank::padded_rows(const Batch& batch) const {
  const int64_t rows = std::ssize(batch.token_ids);
  return stage_.decodes(batch) ? bucket_for(buckets_, rows) : rows;
}

GpuStep GpuRank::step_of(const Batch& batch) const {
  const int64_t rows = padded_rows(batch);
  const bool decodes = stage_.decodes(batch);
  return {.decodes = decodes,
          .verifies = decodes && batch.sequences.size() < batch.token_ids.size(),
          .rows = rows,
          .logit_rows = decodes ? rows : std::ssize(batch.logit_rows)};
}

// Returns null if no graph of this size was recorded. A graph for rows that share pages serves all rows.
const Graph* GpuRank::graph_of(const GpuStep& step) const {
  if (!step.decodes) return nullptr;
  auto graph = graphs_.find({step.rows, step.verifies && !stores_keys_apart_});
  if (graph == graphs_.end()) graph = graphs_.find({step.rows, true});
  return graph == graphs_.end() ? nullptr : &graph->second;
}

Status GpuRank::execute_step(const Batch& batch, const GpuStep& step) {
  FP4MOE_RETURN_IF_ERROR(failure());
  const StreamScope scope(stream_);
  const Event& staged = host_buffers_[num_steps_ % 2].staged;
  if (const Status status = staged.synchronize(); !status.ok()) return wait(step_);
  const int64_t padded = step.decodes ? step.rows : padded_rows(batch);
  DeviceBatch on_device = put(batch, padded, step.verifies);
  on_device.largest_rows = step.rows;
  on_device.largest_logit_rows = step.logit_rows;
  host_buffers_[num_steps_++ % 2].staged.record(stream_);
  if (const Graph* graph = graph_of(step); graph != nullptr) {
    step_ = "the graph of " + std::to_string(padded) + " decode rows";
    graph->launch(stream_);
  } else {
    step_ = "a step of " + std::to_string(padded) + " rows";
    FP4MOE_RETURN_IF_ERROR(run_batch(on_device));
  }
  if (batch.routed_experts != nullptr) FP4MOE_RETURN_IF_ERROR(take_experts(batch, padded));
  return wants_logits_ ? take_logits(std::ssize(batch.logit_rows)) : Status();
}

Status GpuRank::take_logits(int64_t num_rows) {
  gather_logits(num_rows);
  if (host_logits_.data() == nullptr) return {};
  copy_async(host_logits_.data(), logits_.data(), num_rows * config().vocab_size * int64_t{sizeof(float)});
  return wait(step_);
}

// Not a part of a step, because rows that are all greedy do not need it.
void GpuRank::gather_logits(int64_t num_rows) {
  if (group_ != nullptr)
    fp4moe::gather_logits(*group_, config().vocab_size, part_.as<float>(), num_rows, logits_.as<float>());
}

// Waits for the step, then copies its routed experts to the batch; num_rows includes padding.
Status GpuRank::take_experts(const Batch& batch, int64_t num_rows) {
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

DeviceBatch GpuRank::put(const Batch& batch, int64_t num_rows, bool shares_pages) {
  DeviceBatch on_device = stage_.put(batch, num_rows);
  on_device.shares_pages = shares_pages;
  on_device.chosen = {&sampled_rows()->token_id, int64_t{sizeof(SampledRow) / sizeof(int32_t)}};
  return on_device;
}

Status GpuRank::run_batch(const DeviceBatch& on_device) {
  Batch batch;
  batch.device = &on_device;
  batch.routed_experts = experts_.as<int32_t>();
  const Buffer& logits = group_ != nullptr ? part_ : logits_;
  const Status status = rank_.forward_on_rank(batch, logits.as<float>());
  stream_.end_layers();
  return status;
}

// Waits for all enqueued work. Keeps a permanent error, after which execute_step() refuses further steps.
Status GpuRank::wait(const std::string& what) {
  Status status = stream_.synchronize();
  if (status.ok()) status = group_failure();
  return status.ok() ? status : keep_failure(status.with_context("GPU, in " + what));
}

Status GpuRank::keep_failure(const Status& status) {
  if (!is_permanent(status)) return status;
  std::lock_guard lock(mutex_);
  failure_ = status;
  return status;
}

// ---- KV pages exchanged with other engines --------------------------------------------------------

Status GpuRank::read_page(PageId page, int64_t num_tokens, uint8_t* canonical) {
  std::lock_guard lock(page_mutex_);
  FP4MOE_RETURN_IF_ERROR(
      copy_page(rank_.kv().page_copy(page, num_tokens, page_.data()), "reading a KV page"));
  std::copy_n(page_.data(), page_bytes(page, num_tokens), canonical);
  return {};
}

Status GpuRank::write_page(PageId page, int64_t num_tokens, const uint8_t* canonical) {
  std::lock_guard lock(page_mutex_);
  std::copy_n(canonical, page_bytes(page, num_tokens), page_.data());
  KvPageCopyArgs args = rank_.kv().page_copy(page, num_tokens, page_.data());
  args.to_device = true;
  return copy_page(args, "writing a KV page");
}

Status GpuRank::copy_page(KvPageCopyArgs args, const char* what) {
  FP4MOE_RETURN_IF_ERROR(failure());
  const StreamScope scope(page_stream_);
  cuda_copy_kv_page()(args);
  const Status status = page_stream_.synchronize();
  return status.ok() ? status : keep_failure(status.with_context(std::string("GPU, in ") + what));
}

// ---- sampling -------------------------------------------------------------------------------------

Status GpuRank::set_masked_ids(std::span<const int32_t> ids) {
  std::vector<uint32_t> bits(ids.empty() ? 0 : static_cast<size_t>(config().vocab_size / 32 + 1));
  for (const int32_t id : ids) bits[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
  const auto num_bytes = static_cast<int64_t>(bits.size() * sizeof(uint32_t));
  FP4MOE_ASSIGN_OR_RETURN(masked_, Buffer::copy_of(bits.data(), num_bytes, stream_.device().memory()));
  return {};
}

Status GpuRank::start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                             std::span<const uint32_t> allowed, std::span<const int32_t> logprob_ids) {
  const auto edit_bytes = static_cast<int64_t>(edits.size_bytes());
  FP4MOE_CHECK(std::ssize(rows) <= max_logit_rows_ && edit_bytes <= edits_.num_bytes() &&
                   static_cast<int64_t>(allowed.size_bytes()) <= allowed_.num_bytes() &&
                   static_cast<int64_t>(logprob_ids.size_bytes()) <= logprob_ids_.num_bytes() &&
                   num_sampled_ - num_taken_ < 2,
               std::to_string(rows.size()) + " rows cannot be sampled with " + std::to_string(edits.size()) +
                   " edits and " + std::to_string(logprob_ids.size()) + " listed ids");
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
  if (!logprob_ids.empty()) {
    std::copy(logprob_ids.begin(), logprob_ids.end(), buffers.logprob_ids.as<int32_t>());
    copy_async(logprob_ids_.data(), buffers.logprob_ids.data(),
               static_cast<int64_t>(logprob_ids.size_bytes()));
  }
  sample_rows({.logits = logits_.as<float>(),
               .num_rows = std::ssize(rows),
               .vocab_size = config().vocab_size,
               .row_stride = config().vocab_size,
               .masked = masked_.as<uint32_t>(),
               .params = sampled_.as<SampleRowParams>(),
               .edits = edits_.as<LogitEdit>(),
               .allowed = allowed_.as<uint32_t>(),
               .logprob_ids = logprob_ids_.as<int32_t>(),
               .id_logprobs = buffers.id_logprobs.as<float>(),
               .all_greedy = all_greedy,
               .out = sampled_rows(),
               .copy = reinterpret_cast<SampledRow*>(buffers.samples.data() + params_bytes())});
  buffers.step = step_;
  buffers.sampled.record(stream_);
  return {};
}

// The ranks of a group exchange the best ids of greedy rows, and otherwise all logits.
void GpuRank::sample_rows(SampleRowsArgs args) {
  if (group_ == nullptr || !args.all_greedy) {
    gather_logits(args.num_rows);
    return cuda_sample_rows()(args);
  }
  args.logits = part_.as<float>();
  args.vocab_size = args.row_stride = vocab_.count;
  const CommGroup group = group_->exchange_group();
  cuda_sample_shards()(args, {.group = group, .op = {"greedy"}, .first_id = vocab_.first});
}

Status GpuRank::take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs) {
  FP4MOE_CHECK(num_taken_ < num_sampled_, "no rows were sampled");
  const HostBuffers& buffers = host_buffers_[num_taken_++ % 2];
  const Status status = buffers.sampled.synchronize();
  if (const Status asked = stream_.take_failure(); status.ok() && !asked.ok())
    return keep_failure(asked.with_context("GPU, in " + buffers.step));
  if (!status.ok()) return wait(buffers.step + " or its sampling");
  const auto* rows = reinterpret_cast<const SampledRow*>(buffers.samples.data() + params_bytes());
  std::copy_n(rows, out.size(), out.begin());
  std::copy_n(buffers.id_logprobs.as<float>(), id_logprobs.size(), id_logprobs.begin());
  return {};
}

}  // namespace fp4moe
