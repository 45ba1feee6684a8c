// What a GpuRank does before its first step: it loads its shards, allocates, and records its graphs. Reloads
// of its weights.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "comm/nccl_plane.h"
#include "device/device_info.h"
#include "device/device_memory.h"
#include "device/pinned_memory.h"
#include "device/upload_ring.h"
#include "engine/output/logit_edits.h"
#include "engine/ranks/gpu_rank.h"
#include "engine/startup/memory_plan.h"
#include "model/lm_head.h"
#include "model/plan_draft.h"
#include "model/resolve_flags.h"

namespace fp4moe {
namespace {

constexpr int kStreams = 3;  // of a rank: stream_, page_stream_ and side_

}  // namespace

Status GpuRank::load(const RankSetup& setup, const PeerHeap* heap, const ProgressSink& progress) {
  if (setup.others != nullptr) nccl_ = &setup.others->nccl;
  const int rank_here = nccl_ != nullptr ? 0 : rank_.layout().rank;
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, DeviceContext::of(gpu_of_rank(rank_here)));
  const DeviceScope on_gpu(*gpu);
  FP4MOE_ASSIGN_OR_RETURN(stream_, Stream::make());
  places_ = std::make_unique<PlacedMemory>(gpu->memory());
  rank_.set_weight_memory(places_.get());
  {
    const UploadScope uploads(rank_.pool());
    const StreamScope scope(stream_);
    FP4MOE_RETURN_IF_ERROR(prepare_cuda_dense_ops());
    if (heap != nullptr || nccl_ != nullptr) FP4MOE_RETURN_IF_ERROR(make_groups(setup, heap));
    FP4MOE_RETURN_IF_ERROR(rank_.load(setup, progress));
    FP4MOE_RETURN_IF_ERROR(wait("loading"));
  }
  places_->seal();
  FP4MOE_RETURN_IF_ERROR(make_side_stream());
  return allocate(setup);
}

Status GpuRank::check_weights(const Checkpoint& checkpoint) {
  FP4MOE_RETURN_IF_ERROR(wait("the last step"));
  const DeviceScope on_gpu(stream_.device());
  const UploadScope uploads(rank_.pool());
  const StreamScope scope(stream_);
  FP4MOE_RETURN_IF_ERROR(rank_.check_weights(checkpoint));
  return wait("checking the weights");
}

// The weights keep their addresses, which the graphs hold.
Status GpuRank::replace_weights(const Checkpoint& checkpoint, const ProgressSink& progress) {
  const DeviceScope on_gpu(stream_.device());
  const UploadScope uploads(rank_.pool());
  const StreamScope scope(stream_);
  Status status = rank_.replace_weights(checkpoint, progress);
  if (status.ok()) status = wait("loading");
  return fail_if(status);
}

// The scales of an FP8 KV cache are arguments of the recorded kernels.
Status GpuRank::replace_graphs(const EngineConfig& flags) {
  if (rank_.kv_dtype() != DType::kF8E4M3) return {};
  graphs_.clear();
  return fail_if(record_graphs(flags));
}

Status GpuRank::fail_if(const Status& status) {
  if (status.ok()) return status;
  std::lock_guard lock(mutex_);
  return failure_ = status;
}

// Ranks that exchange rows run their shared experts while the rows are in flight and need no side stream. Nor
// is there one if the streams of a GPU's ranks would share hardware queues: a kernel that waits for another
// rank's kernel could be in front of that kernel. The bits are the same without a side stream.
Status GpuRank::make_side_stream() {
  const bool fits = ranks_per_gpu() * kStreams <= kHardwareQueues;
  const bool exchanges = groups_of(BatchModel::kTarget).world != nullptr;
  if (config().shared_intermediate_size == 0 || exchanges || !fits) return {};
  FP4MOE_ASSIGN_OR_RETURN(side_, SideStream::make());
  stream_.set_side(&side_);
  return {};
}

Status GpuRank::make_groups(const RankSetup& setup, const PeerHeap* heap) {
  FP4MOE_RETURN_IF_ERROR(make_groups_of(BatchModel::kTarget, setup, heap));
  if (setup.plan.draft != nullptr) FP4MOE_RETURN_IF_ERROR(make_groups_of(BatchModel::kDraft, setup, heap));
  stream_.set_has_peers();
  return {};
}

// The two models' collectives of a group have one region: their operations follow each other on the group's
// streams, in the same order on all of its ranks.
Status GpuRank::make_groups_of(BatchModel model, const RankSetup& setup, const PeerHeap* heap) {
  const RankLayout& layout = rank_.layout();
  const CommMemory& memory = setup.memory;
  const auto timeout = comm_timeout(setup.flags);
  const bool is_draft = model == BatchModel::kDraft;
  const DeviceRegion& world = is_draft ? memory.device_draft_world : memory.device_world;
  Groups& groups = groups_[static_cast<size_t>(model)];
  const auto make = [&](int first, int size, int rank, const DeviceRegion& region) {
    if (nccl_ == nullptr) return DeviceCommunicator::make(*heap, first, size, rank, region, timeout);
    return DeviceCommunicator::make_staged(std::make_unique<NcclPlane>(*nccl_, first), first, size, rank,
                                           region);
  };
  if (const int size = layout.attention_tp(); size > 1) {
    FP4MOE_ASSIGN_OR_RETURN(groups.attention, make(layout.dp_rank() * size, size, layout.attention_rank(),
                                                   memory.device_attention));
    if (setup.flags.tp_reduce_dtype == "bfloat16") groups.attention->send_bf16_partials();
  }
  if (world.exchange_bytes > 0) {
    FP4MOE_ASSIGN_OR_RETURN(groups.world, make(0, layout.tp, layout.rank, world));
  }
  if (memory.device_head.gather_bytes > 0) {
    FP4MOE_ASSIGN_OR_RETURN(groups.shared_head, make(0, layout.tp, layout.rank, memory.device_head));
  }
  for (DeviceCommunicator* group : groups.all())
    if (group != nullptr && is_draft) group->name_model("the draft model");
  rank_.set_device_groups(model, {groups.attention.get(), groups.world.get(), groups.head()});
  return {};
}

void GpuRank::rehearse_groups(bool on) {
  for (const Groups& groups : groups_)
    for (DeviceCommunicator* group : groups.all())
      if (group != nullptr) group->rehearse(on);
}

Status GpuRank::group_failure() const {
  Status first;
  uint64_t time = 0;
  for (const Groups& groups : groups_)
    for (const DeviceCommunicator* group : groups.all()) {
      const Status status = group == nullptr ? Status() : group->failure();
      if (status.ok() || (!first.ok() && time <= group->failed_at())) continue;
      first = status;
      time = group->failed_at();
    }
  return first;
}

Status GpuRank::allocate(const RankSetup& setup) {
  const RankGroupOptions& options = setup.options;
  max_logit_rows_ = options.max_logit_rows / rank_.layout().dp;
  draft_shape_ = draft_shape(setup.plan, options);
  const int64_t per_request = rows_per_request(setup.flags);
  const int64_t pool_tokens = rank_.kv().num_pages() * page_size();
  const int64_t context = options.context_length > 0 ? options.context_length : pool_tokens;
  const StageLimits limits{.max_rows = options.max_batch_tokens,
                           .max_sequences = std::max<int64_t>(max_logit_rows_, 1),
                           .max_logit_rows = max_logit_rows_,
                           .rows_per_request = per_request,
                           .max_pages = (context + page_size() - 1) / page_size(),
                           .has_window_pages = num_window_pages() > 0,
                           .has_feature_rows = draft_shape_.takes_features,
                           .has_slots = rank_.kv().state_cache().num_slots() > 0,
                           .accepts_drafts = options.accepts_drafts};
  FP4MOE_ASSIGN_OR_RETURN(stage_, BatchStage::make(limits, pinned_memory(), device_memory()));
  FP4MOE_RETURN_IF_ERROR(allocate_logits(setup));
  const int64_t sample_bytes = max_logit_rows_ * int64_t{sizeof(SampleRowParams) + sizeof(SampledRow)};
  const int64_t kept_bytes = 2 * most_drafts() * int64_t{sizeof(SampledRow)};
  FP4MOE_ASSIGN_OR_RETURN(sampled_, Buffer::make(sample_bytes + kept_bytes, device_memory()));
  const int64_t edit_bytes =
      max_logit_edits(max_logit_rows_, pool_tokens * per_request, std::ssize(config().eos_token_ids)) *
      int64_t{sizeof(LogitEdit)};
  FP4MOE_ASSIGN_OR_RETURN(edits_, Buffer::make(edit_bytes, device_memory()));
  const int64_t mask_bytes = max_logit_rows_ * ((config().vocab_size + 31) / 32) * int64_t{sizeof(uint32_t)};
  FP4MOE_ASSIGN_OR_RETURN(allowed_, Buffer::make(mask_bytes, device_memory()));
  const int64_t id_bytes = max_logit_rows_ * SamplingParams::kMaxLogprobIds * int64_t{sizeof(int32_t)};
  FP4MOE_ASSIGN_OR_RETURN(logprob_ids_, Buffer::make(id_bytes, device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(experts_, Buffer::make(expert_bytes(options.max_batch_tokens), device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(host_experts_, Buffer::make(experts_.num_bytes(), pinned_memory()));
  FP4MOE_ASSIGN_OR_RETURN(page_stream_, Stream::make());
  buckets_ = decode_buckets(std::max<int64_t>(max_logit_rows_ / per_request, 1), setup.flags.cuda_graph_bs,
                            per_request);
  return allocate_host_buffers(sample_bytes, edit_bytes);
}

// For the target and for a draft model, which run one after the other.
Status GpuRank::allocate_logits(const RankSetup& setup) {
  const RankLayout& layout = rank_.layout();
  const DeviceCommunicator* const head = groups_of(BatchModel::kTarget).head();
  int64_t most = 0, most_of_rank = 0;  // ids
  const auto add = [&](BatchModel model, const ModelConfig& config) {
    const Shard vocab = head == nullptr ? Shard{0, config.vocab_size}
                                        : vocab_shard(config.vocab_size, head->size(), head->rank());
    shapes_[static_cast<size_t>(model)] = {
        config.vocab_size, vocab, setup.flags.enable_deterministic_inference || config.mla.kv_lora_rank > 0};
    most = std::max(most, config.vocab_size);
    most_of_rank = std::max(most_of_rank, vocab.count);
  };
  add(BatchModel::kTarget, config());
  if (has_draft()) {
    add(BatchModel::kDraft, setup.plan.draft->config);
    FP4MOE_ASSIGN_OR_RETURN(draft_rows_,
                            Buffer::make(2 * most_drafts() * int64_t{sizeof(SampledRow)}, pinned_memory()));
    for (Event& drafted : drafted_) {
      FP4MOE_ASSIGN_OR_RETURN(drafted, Event::make());
    }
    FP4MOE_RETURN_IF_ERROR(put_target_ids({}));
  }
  const int64_t logit_bytes = max_logit_rows_ * most * int64_t{sizeof(float)};
  FP4MOE_ASSIGN_OR_RETURN(logits_, Buffer::make(logit_bytes, device_memory()));
  if (shares_vocab()) {
    const int64_t rows = max_logit_rows_ * (has_all_rows() ? layout.dp : 1);
    const int64_t part_bytes = rows * most_of_rank * int64_t{sizeof(float)};
    FP4MOE_ASSIGN_OR_RETURN(part_, Buffer::make(part_bytes, device_memory()));
  }
  if (wants_logits_ && layout.attention_rank() == 0) {
    FP4MOE_ASSIGN_OR_RETURN(host_logits_, Buffer::make(logit_bytes, pinned_memory()));
  }
  return {};
}

Status GpuRank::allocate_host_buffers(int64_t sample_bytes, int64_t edit_bytes) {
  for (HostBuffers& buffers : host_buffers_) {
    FP4MOE_ASSIGN_OR_RETURN(buffers.allowed, Buffer::make(allowed_.num_bytes(), pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.edits, Buffer::make(edit_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.logprob_ids, Buffer::make(logprob_ids_.num_bytes(), pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.id_logprobs, Buffer::make(logprob_ids_.num_bytes(), pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.samples, Buffer::make(sample_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(buffers.staged, Event::make());
    FP4MOE_ASSIGN_OR_RETURN(buffers.sampled, Event::make());
  }
  return {};
}

// The graphs to record, largest first. Steps without drafts have at most a row for each request, and so have
// the passes of a draft model that does not extend few sequences (widens()).
std::vector<GpuRank::GraphKey> GpuRank::decode_graphs() const {
  std::vector<GraphKey> graphs;
  for (auto rows = buckets_.rbegin(); rows != buckets_.rend(); ++rows) {
    add_graphs(BatchModel::kTarget, *rows, graphs);
    if (has_draft()) add_graphs(BatchModel::kDraft, *rows, graphs);
  }
  return graphs;
}

void GpuRank::add_graphs(BatchModel model, int64_t num_rows, std::vector<GraphKey>& graphs) const {
  const int64_t per_request = stage_.limits().rows_per_request;
  const bool is_single = num_rows <= bucket_for(buckets_, max_logit_rows_ / per_request);
  const bool is_draft = model == BatchModel::kDraft, apart = shape_of(model).stores_keys_apart;
  const bool shares_pages = !is_draft || num_rows <= bucket_for(buckets_, most_widened_rows());
  if (!apart && shares_pages && per_request > 1 && num_rows > 1)
    graphs.push_back({num_rows, true, model, false});
  if (is_single || (apart && shares_pages)) graphs.push_back({num_rows, false, model, false});
  if (is_single && is_draft && draft_shape_.takes_features) graphs.push_back({num_rows, false, model, true});
}

// Runs steps of doubling sizes, so that each kernel and each tactic of a layer runs for at least one of them.
// The KV pages that these steps write to do not hold any request's tokens yet.
Status GpuRank::rehearse() {
  if (!has_peers()) return {};
  rehearse_groups(true);
  const int64_t most = std::min(stage_.limits().max_rows,
                                std::min(stage_.limits().max_pages, rank_.kv().num_pages()) * page_size());
  FP4MOE_RETURN_IF_ERROR(rehearse_steps(BatchModel::kTarget, most));
  if (has_draft())
    FP4MOE_RETURN_IF_ERROR(rehearse_steps(BatchModel::kDraft, std::min(most, draft_shape_.max_positions)));
  const StreamScope scope(stream_);
  for (const GraphKey& key : decode_graphs()) {
    FP4MOE_RETURN_IF_ERROR(run_batch(put({}, key.rows, key.shares_pages), key.model, key.chains));
    FP4MOE_RETURN_IF_ERROR(wait("the rehearsal of " + std::to_string(key.rows) + " decode rows"));
  }
  rehearse_groups(false);
  FP4MOE_RETURN_IF_ERROR(rehearse_copies());
  return wait("the rehearsal");
}

// The kernels that copy pages and slots: later, loading one on its first use could wait for another rank's
// kernels, which may be waiting for this rank's next step.
Status GpuRank::rehearse_copies() {
  FP4MOE_ASSIGN_OR_RETURN(const Buffer token,
                          Buffer::make(rank_.page_token_bytes(KvLayers::kFull), pinned_memory()));
  std::fill_n(token.data(), token.num_bytes(), uint8_t{0});
  const StagedPage page[] = {{0, 1, 0}};
  FP4MOE_RETURN_IF_ERROR(start_pages(page, token.data(), CopyDirection::kToRank));
  FP4MOE_RETURN_IF_ERROR(finish_copies("the rehearsal"));
  const StateCopy scrap[] = {{0, 0}};
  return rank_.states().num_slots() > 0 ? copy_states(scrap) : Status();
}

Status GpuRank::rehearse_steps(BatchModel model, int64_t most) {
  const int64_t num_pages = (most + page_size() - 1) / page_size();
  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<int32_t> window_pages(num_window_pages() > 0 ? pages.size() : 0);  // all of them page 0
  const bool accepts = stage_.limits().accepts_drafts && model == BatchModel::kTarget;
  for (int64_t rows = 1;; rows = std::min(2 * rows, most)) {
    const std::vector<int32_t> ids(static_cast<size_t>(rows));
    std::vector<int64_t> positions(ids.size()),
        logit_rows(static_cast<size_t>(std::min(rows, max_logit_rows_)));
    std::iota(positions.begin(), positions.end(), 0);
    std::iota(logit_rows.begin(), logit_rows.end(), 0);
    const auto count = static_cast<size_t>((rows + page_size() - 1) / page_size());
    const SequenceRows sequence{0, rows, 0, std::span(pages).first(count),
                                std::span(window_pages).first(std::min(count, window_pages.size()))};
    Batch batch{ids, positions, {&sequence, 1}, logit_rows};
    batch.model = model;
    // The row before had no drafts, so these stay where they are.
    const RowsMove move{.row = rows == 2 && accepts && stage_.decodes(batch) ? 0 : -1, .follows = true};
    batch.moves = {&move, 1};
    FP4MOE_RETURN_IF_ERROR(execute_step(batch, step_of(batch)));
    if (model == BatchModel::kTarget) {
      FP4MOE_RETURN_IF_ERROR(rehearse_sampling(std::ssize(logit_rows), accepts && rows == 1));
    } else {
      std::vector<int32_t> draft_ids(logit_rows.size());
      FP4MOE_RETURN_IF_ERROR(take_draft_ids(logit_rows, draft_ids));
    }
    if (rows == most) return {};
  }
}

Status GpuRank::rehearse_sampling(int64_t num_rows, bool accepts) {
  for (const bool greedy : {true, false}) {
    SampleRowParams params;
    params.temperature = greedy ? 0 : 1;
    const std::vector<SampleRowParams> rows(static_cast<size_t>(num_rows), params);
    std::vector<SampledRow> sampled(rows.size());
    FP4MOE_RETURN_IF_ERROR(start_sample(rows, {}, {}, {}, greedy));
    if (accepts) FP4MOE_RETURN_IF_ERROR(accept_drafts());
    FP4MOE_RETURN_IF_ERROR(take_sampled(sampled, {}));
  }
  return {};
}

// For each size, records a step that consists only of padding; its graph serves all steps of that size. The
// step first runs once, so that kernels and libraries make their first-use allocations.
Status GpuRank::record_graphs(const EngineConfig& flags) {
  limits_waits_ = nccl_;
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
    const auto run = [&] { return run_batch(batch, key.model, key.chains); };
    // rehearse() has run it, but without the exchanges between processes, which must not connect in a
    // capture.
    if (!has_peers() || nccl_ != nullptr) FP4MOE_RETURN_IF_ERROR(run());
    FP4MOE_RETURN_IF_ERROR(wait("the first decode step of " + std::to_string(key.rows) + " rows"));
    Result<Graph> graph = Graph::capture(stream_, run);
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

Result<std::vector<std::unique_ptr<GroupPages>>> make_group_pages(
    std::span<const std::unique_ptr<GpuRank>> ranks) {
  const Rank& any = ranks[0]->rank();
  const int64_t token_bytes =
      std::max(any.page_token_bytes(KvLayers::kFull), any.page_token_bytes(KvLayers::kWindow));
  const int64_t most_bytes = std::max(any.kv().page_size() * token_bytes, kPageBatchBytes);
  const int num_ranks = any.layout().attention_tp();
  std::vector<std::unique_ptr<GroupPages>> groups;
  for (int first = 0; first < any.layout().tp; first += num_ranks) {
    FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, DeviceContext::of(gpu_of_rank(first)));
    const DeviceScope on_gpu(*gpu);
    FP4MOE_ASSIGN_OR_RETURN(Buffer staging, Buffer::make(most_bytes, pinned_memory()));
    std::vector<PageCopier*> copiers;
    for (int r = first; r < first + num_ranks; ++r) copiers.push_back(ranks[static_cast<size_t>(r)].get());
    groups.push_back(std::make_unique<GroupPages>(std::move(copiers), first, std::move(staging)));
  }
  return groups;
}

Result<std::unique_ptr<Job>> connect_movers(std::span<const std::unique_ptr<GpuRank>> ranks,
                                            const RankSetup& setup, const PeerHeap& heap) {
  constexpr int64_t kRecordBytes = 256, kStagingBytes = 1 << 20;
  const auto num_ranks = static_cast<int>(ranks.size());
  FP4MOE_ASSIGN_OR_RETURN(
      std::unique_ptr<Job> job,
      Job::open({.fabric = "threads",
                 .num_ranks = num_ranks,
                 .heap_bytes = Communicator::heap_bytes(num_ranks, kRecordBytes, kStagingBytes),
                 .timeout_seconds = setup.flags.comm_timeout}));
  MoveArea area{.num_bytes = setup.memory.move_bytes};
  for (int r = 0; r < num_ranks; ++r) area.of_rank.push_back(heap.base(r) + setup.memory.move_offset);
  for (int r = 0; r < num_ranks; ++r)
    ranks[static_cast<size_t>(r)]->rank().set_movers(
        job->endpoint(r), {.record_bytes = kRecordBytes, .staging_bytes = kStagingBytes},
        {.timeout = comm_timeout(setup.flags)}, area);
  return job;
}

}  // namespace fp4moe
