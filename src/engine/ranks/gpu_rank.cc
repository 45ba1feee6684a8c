#include "engine/ranks/gpu_rank.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "device/pinned_memory.h"
#include "kernels/device_copy.h"
#include "model/lm_head.h"

namespace fp4moe {
namespace {

// Returns whether the error is permanent. A device error is, because every later CUDA call in the process
// returns it too; so is the failure of a group.
bool is_permanent(const Status& status) {
  return status.code() == StatusCode::kInternal || status.code() == StatusCode::kDeadline;
}

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

// ---- steps ----------------------------------------------------------------------------------------

int64_t GpuRank::padded_rows(const Batch& batch) const {
  const int64_t rows = std::ssize(batch.token_ids);
  return stage_.decodes(batch) ? bucket_for(buckets_, rows) : rows;
}

bool GpuRank::widens(const Batch& batch) const {
  return batch.model == BatchModel::kDraft && std::ssize(batch.token_ids) <= most_widened_rows() &&
         std::ranges::all_of(batch.sequences, [this](const SequenceRows& rows) {
           return rows.num_rows <= stage_.limits().rows_per_request;
         });
}

GpuStep GpuRank::step_of(const Batch& batch) const {
  const int64_t rows = padded_rows(batch);
  const bool decodes = stage_.decodes(batch);
  return {.model = batch.model,
          .chains = batch.chains,
          .decodes = decodes,
          .verifies = decodes && batch.sequences.size() < batch.token_ids.size(),
          .rows = rows,
          .logit_rows = decodes ? rows : std::ssize(batch.logit_rows)};
}

// Returns null if no graph of this size was recorded. A graph for rows that share pages serves all rows.
const Graph* GpuRank::graph_of(const GpuStep& step) const {
  if (!step.decodes) return nullptr;
  const bool shares_pages = step.verifies && !shape_of(step.model).stores_keys_apart;
  auto graph = graphs_.find({step.rows, shares_pages, step.model, step.chains});
  if (graph == graphs_.end()) graph = graphs_.find({step.rows, true, step.model, step.chains});
  return graph == graphs_.end() ? nullptr : &graph->second;
}

Status GpuRank::execute_step(const Batch& batch, const GpuStep& step) {
  FP4MOE_RETURN_IF_ERROR(failure());
  const StreamScope scope(stream_);
  const Event& staged = host_buffers_[num_steps_ % 2].staged;
  if (const Status status = synchronize(staged, step_); !status.ok()) return wait(step_);
  const int64_t padded = step.decodes ? step.rows : padded_rows(batch);
  DeviceBatch on_device = put(batch, padded, step.verifies);
  on_device.largest_rows = step.rows;
  on_device.largest_logit_rows = step.logit_rows;
  host_buffers_[num_steps_++ % 2].staged.record(stream_);
  last_model_ = step.model;
  group_rows_ = step.logit_rows;
  run_copies(batch.state_copies);
  const std::string of_draft = step.model == BatchModel::kDraft ? " of the draft model" : "";
  if (const Graph* graph = graph_of(step); graph != nullptr) {
    step_ = "the graph of " + std::to_string(padded) + " decode rows" + of_draft;
    graph->launch(stream_);
  } else {
    step_ = "a step of " + std::to_string(padded) + " rows" + of_draft;
    FP4MOE_RETURN_IF_ERROR(run_batch(on_device, step.model, step.chains));
  }
  if (step.model == BatchModel::kDraft) {
    choose_draft_ids(std::ssize(batch.logit_rows), step);
    drafted_[step.half].record(stream_);
  }
  if (batch.routed_experts != nullptr) FP4MOE_RETURN_IF_ERROR(take_experts(batch, padded));
  return wants_logits_ ? take_logits(std::ssize(batch.logit_rows)) : Status();
}

void GpuRank::run_copies(std::span<const StateCopy> copies) {
  for (const StateCopy& copy : copies) cuda_copy_state()(rank_.states().device_copy(copy));
}

Status GpuRank::copy_states(std::span<const StateCopy> copies) {
  FP4MOE_RETURN_IF_ERROR(failure());
  const StreamScope scope(stream_);
  run_copies(copies);
  return {};
}

Status GpuRank::take_logits(int64_t num_rows) {
  gather_logits(num_rows);
  if (host_logits_.data() == nullptr) return {};
  copy_async(host_logits_.data(), logits_.data(),
             num_rows * last_shape().vocab_size * int64_t{sizeof(float)});
  return wait(step_);
}

// Not a part of a step, because rows that are all greedy do not need it.
void GpuRank::gather_logits(int64_t num_rows) {
  if (!shares_vocab()) return;
  std::vector<int64_t> first_row;
  if (has_all_rows())
    for (int r = 0; r < last_head().size(); ++r)
      first_row.push_back(first_head_row(rank_.layout(), r, group_rows_));
  fp4moe::gather_logits(last_head(), last_shape().vocab_size, part_.as<float>(), exchanged_rows(num_rows),
                        first_row, logits_.as<float>());
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
  on_device.chosen = chosen();
  return on_device;
}

Status GpuRank::run_batch(const DeviceBatch& on_device, BatchModel model, bool chains) {
  Batch batch;
  batch.device = &on_device;
  batch.model = model;
  batch.chains = chains;
  if (model == BatchModel::kTarget) batch.routed_experts = experts_.as<int32_t>();
  const Buffer& logits = shares_vocab() ? part_ : logits_;
  const Status status = rank_.forward_on_rank(batch, logits.as<float>());
  stream_.end_layers();
  return status;
}

// Waits for all enqueued work. Keeps a permanent error, after which execute_step() refuses further steps.
Status GpuRank::wait(const std::string& what) {
  Status status;
  {
    const HostWait limit(limits_waits_, what);
    status = stream_.synchronize();
  }
  // The failure of an exchange between processes may be the cause of errors of this GPU.
  if (const Status failed = group_failure(); !failed.ok() && (status.ok() || nccl_ != nullptr))
    status = failed;
  return status.ok() ? status : keep_failure(status.with_context("GPU, in " + what));
}

Status GpuRank::synchronize(const Event& event, const std::string& what) {
  const HostWait limit(limits_waits_, what);
  return event.synchronize();
}

// The inputs of a step are copied behind the steps before it.
Status GpuRank::finish_steps_before_last() {
  if (num_steps_ == 0) return {};
  const StreamScope scope(stream_);
  if (const Status status = synchronize(host_buffers_[(num_steps_ - 1) % 2].staged, step_); !status.ok())
    return wait(step_);
  return group_failure();
}

Status GpuRank::keep_failure(const Status& status) {
  if (!is_permanent(status)) return status;
  std::lock_guard lock(mutex_);
  failure_ = status;
  return status;
}

Status GpuRank::rebalance_experts() {
  const DeviceScope on_gpu(stream_.device());
  const StreamScope scope(stream_);
  Status status = rank_.forward_on_rank({.moves_experts = true}, nullptr);
  if (status.ok()) status = wait("moving experts");
  if (status.ok()) return {};
  std::lock_guard lock(mutex_);
  return failure_ = status;
}

// ---- KV pages and states exchanged with other engines ----------------------------------------------

// Enqueues copies of the pages of one group of layers.
void GpuRank::enqueue_pages(const KvCache& kv, KvLayers layers, std::span<const StagedPage> pages,
                            uint8_t* staging, CopyDirection direction) {
  if (direction == CopyDirection::kFromRank && !kv.sends_pages()) return;
  KvPagesCopyArgs args;
  const auto launch = [&] {
    if (args.num_pages > 0) cuda_copy_kv_pages()(args);
    args.num_pages = 0;
  };
  for (const StagedPage& page : pages) {
    if (page.page.layers != layers || page.num_tokens == 0) continue;
    args.each = kv.page_copy(page.page, page.num_tokens, staging);
    args.each.to_device = direction == CopyDirection::kToRank;
    args.pages[args.num_pages++] = {page.page.page, static_cast<int32_t>(page.num_tokens), page.offset};
    if (args.num_pages == KvPagesCopyArgs::kMostPages) launch();
  }
  launch();
}

// Copies pages of the target, and those of the draft model behind them, which passes may still be computing.
Status GpuRank::start_pages(std::span<const StagedPage> pages, uint8_t* staging, CopyDirection direction) {
  FP4MOE_RETURN_IF_ERROR(failure());
  const StreamScope scope(page_stream_);
  for (const KvLayers layers : {KvLayers::kFull, KvLayers::kWindow}) {
    enqueue_pages(rank_.kv(), layers, pages, staging, direction);
    const KvCache* const draft = rank_.shared_draft_kv(layers);
    if (draft == nullptr) continue;
    for (const Event& drafted : drafted_) drafted.hold(page_stream_);
    std::vector<StagedPage> behind(pages.begin(), pages.end());
    for (StagedPage& page : behind) page.offset += page.num_tokens * rank_.kv().token_bytes(layers);
    enqueue_pages(*draft, layers, behind, staging, direction);
  }
  return {};
}

Status GpuRank::start_state(int32_t slot, int64_t first, std::span<uint8_t> staging,
                            CopyDirection direction) {
  FP4MOE_RETURN_IF_ERROR(failure());
  const StreamScope scope(page_stream_);
  const bool to_device = direction == CopyDirection::kToRank;
  for (const StateCache::Piece& piece : rank_.states().pieces(slot, first, std::ssize(staging))) {
    uint8_t* const staged = staging.data() + piece.offset;
    copy_async(to_device ? piece.data : staged, to_device ? staged : piece.data, piece.num_bytes);
  }
  return {};
}

Status GpuRank::finish_copies(const char* what) {
  const StreamScope scope(page_stream_);
  const Status status = page_stream_.synchronize();
  return status.ok() ? status : keep_failure(status.with_context(std::string("GPU, in ") + what));
}

// ---- sampling -------------------------------------------------------------------------------------

Status GpuRank::set_masked_ids(std::span<const int32_t> ids) {
  std::vector<uint32_t> bits(ids.empty() ? 0 : static_cast<size_t>(config().vocab_size / 32 + 1));
  for (const int32_t id : ids) bits[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
  const auto num_bytes = static_cast<int64_t>(bits.size() * sizeof(uint32_t));
  FP4MOE_ASSIGN_OR_RETURN(masked_, Buffer::copy_of(bits.data(), num_bytes, stream_.device().memory()));
  return has_draft() ? put_target_ids(ids) : Status();
}

// Ids that the draft model does not take have no target id here, because a chained pass takes it unseen.
Status GpuRank::put_target_ids(std::span<const int32_t> masked) {
  const int64_t most = std::min(config().vocab_size, draft_shape_.num_input_ids);
  std::vector<bool> is_masked(static_cast<size_t>(config().vocab_size));
  for (const int32_t id : masked) is_masked[static_cast<size_t>(id)] = true;
  std::vector<int32_t> ids(static_cast<size_t>(draft_shape_.vocab_size));
  for (size_t i = 0; i < ids.size(); ++i) {
    const int32_t id = target_id(static_cast<int32_t>(i), rank_.draft_token_ids(), most);
    ids[i] = id >= 0 && !is_masked[static_cast<size_t>(id)] ? id : -1;
  }
  const auto num_bytes = static_cast<int64_t>(ids.size() * sizeof(int32_t));
  FP4MOE_ASSIGN_OR_RETURN(target_ids_, Buffer::copy_of(ids.data(), num_bytes, stream_.device().memory()));
  return {};
}

Status GpuRank::start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                             std::span<const uint32_t> allowed, std::span<const int32_t> logprob_ids,
                             bool all_greedy) {
  const auto edit_bytes = static_cast<int64_t>(edits.size_bytes());
  FP4MOE_CHECK(std::ssize(rows) <= max_logit_rows_ && edit_bytes <= edits_.num_bytes() &&
                   static_cast<int64_t>(allowed.size_bytes()) <= allowed_.num_bytes() &&
                   static_cast<int64_t>(logprob_ids.size_bytes()) <= logprob_ids_.num_bytes() &&
                   num_sampled_ - num_taken_ < 2,
               std::to_string(rows.size()) + " rows cannot be sampled with " + std::to_string(edits.size()) +
                   " edits and " + std::to_string(logprob_ids.size()) + " listed ids");
  const StreamScope scope(stream_);
  HostBuffers& buffers = host_buffers_[num_sampled_++ % 2];
  if (!all_greedy) {
    std::copy(rows.begin(), rows.end(), buffers.samples.as<SampleRowParams>());
    copy_async(sampled_.data(), buffers.samples.data(), std::ssize(rows) * int64_t{sizeof(SampleRowParams)});
    stage_.move_randoms(sampled_.as<SampleRowParams>());
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
               .chosen = chosen(),
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

// Ranks that share an LM head exchange the best ids of greedy rows if they share memory, and otherwise all
// logits.
void GpuRank::sample_rows(SampleRowsArgs args) {
  if (!shares_vocab() || !args.all_greedy || !last_head().shares_memory()) {
    gather_logits(args.num_rows);
    return cuda_sample_rows()(args);
  }
  args.logits = part_.as<float>();
  const Shard& vocab = last_shape().vocab;
  args.vocab_size = args.row_stride = vocab.count;
  const CommGroup group = last_head().exchange_group();
  const RankLayout& layout = rank_.layout();
  cuda_sample_shards()(args,
                       {.group = group,
                        .op = {"greedy"},
                        .first_id = vocab.first,
                        .num_rows = exchanged_rows(args.num_rows) * (has_all_rows() ? layout.dp : 1),
                        .first_row = has_all_rows() ? first_head_row(layout, layout.rank, group_rows_) : 0});
}

// The rows of the last start_sample() are those of the stage's last batch.
Status GpuRank::accept_drafts() {
  FP4MOE_CHECK(last_model_ == BatchModel::kTarget && num_taken_ < num_sampled_, "no rows were sampled");
  const StreamScope scope(stream_);
  HostBuffers& buffers = host_buffers_[(num_sampled_ - 1) % 2];
  stage_.accept_drafts(sampled_rows(),
                       reinterpret_cast<SampledRow*>(buffers.samples.data() + params_bytes()));
  buffers.sampled.record(stream_);
  return {};
}

Status GpuRank::take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs) {
  FP4MOE_CHECK(num_taken_ < num_sampled_, "no rows were sampled");
  const HostBuffers& buffers = host_buffers_[num_taken_++ % 2];
  const Status status = synchronize(buffers.sampled, buffers.step);
  if (const Status asked = stream_.take_failure(); status.ok() && !asked.ok())
    return keep_failure(asked.with_context("GPU, in " + buffers.step));
  if (!status.ok()) return wait(buffers.step + " or its sampling");
  const auto* rows = reinterpret_cast<const SampledRow*>(buffers.samples.data() + params_bytes());
  std::copy_n(rows, out.size(), out.begin());
  std::copy_n(buffers.id_logprobs.as<float>(), id_logprobs.size(), id_logprobs.begin());
  return {};
}

// After a pass of the draft model. Kernels of later passes read the ids on the device; the host may read them
// as soon as anything later on the stream is done.
void GpuRank::choose_draft_ids(int64_t num_rows, const GpuStep& step) {
  if (exchanged_rows(num_rows) == 0) return;
  const int64_t vocab_size = last_shape().vocab_size;
  FP4MOE_CHECK(step.first_draft + num_rows <= most_drafts(),
               std::to_string(num_rows) + " rows of drafts after " + std::to_string(step.first_draft));
  const int64_t first = step.half * most_drafts() + step.first_draft;
  sample_rows({.logits = logits_.as<float>(),
               .num_rows = num_rows,
               .vocab_size = vocab_size,
               .row_stride = vocab_size,
               .all_greedy = true,
               .put_ids = target_ids_.as<int32_t>(),
               .out = sampled_rows() + max_logit_rows_ + first,
               .copy = draft_rows_.as<SampledRow>() + first});
}

Status GpuRank::take_draft_ids(std::span<const int64_t> rows, std::span<int32_t> ids) {
  if (rows.empty()) return {};
  const Status status = synchronize(drafted_[rows[0] / most_drafts()], step_);
  if (const Status asked = stream_.take_failure(); status.ok() && !asked.ok())
    return keep_failure(asked.with_context("GPU, in " + step_));
  if (!status.ok()) return wait(step_);
  for (size_t i = 0; i < ids.size(); ++i) {
    const SampledRow& chosen = draft_rows_.as<SampledRow>()[rows[i]];
    ids[i] = chosen.status == SampleStatus::kOk ? chosen.token_id : -1;
  }
  return {};
}

}  // namespace fp4moe
