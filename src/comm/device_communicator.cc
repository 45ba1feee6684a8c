#include "comm/device_communicator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/device_memory.h"
#include "device/pinned_memory.h"
#include "kernels/device_moe.h"

namespace fp4moe {
namespace {

// With fewer rows, waiting twice takes longer than the bytes that shares save.
constexpr int64_t kLeastSharedRows = 512;

constexpr int64_t align128(int64_t bytes) { return (bytes + 127) / 128 * 128; }

}  // namespace

CommLayout DeviceRegion::layout(int num_ranks) const {
  return comm_layout(num_ranks, align128(word_bytes), align128(gather_bytes), align128(exchange_bytes),
                     is_staged, align128(normed_bytes));
}

int64_t DeviceRegion::num_bytes(int num_ranks) const { return layout(num_ranks).num_bytes; }

// From models of one and two exchanges at 325 GB/s, fitted to measurements of two ranks on two H200.
int64_t two_shot_bytes(int num_ranks) {
  if (num_ranks <= 2) return INT64_MAX;
  return num_ranks <= 4 ? int64_t{550} << 10 : int64_t{175} << 10;
}

int64_t sum_word_bytes(int num_ranks) {
  constexpr int64_t kOperand = 24 << 20;  // in two exchanges, each rank has a part of it
  return num_ranks <= 2 ? kOperand : kOperand / num_ranks;
}

Result<std::unique_ptr<DeviceCommunicator>> DeviceCommunicator::make(const PeerHeap& heap, int first_rank,
                                                                     int num_ranks, int rank,
                                                                     const DeviceRegion& region,
                                                                     std::chrono::nanoseconds timeout) {
  FP4MOE_CHECK(first_rank >= 0 && rank >= 0 && rank < num_ranks && !region.is_staged &&
                   first_rank + num_ranks <= heap.num_ranks() && region.offset % 128 == 0 &&
                   region.offset + region.num_bytes(num_ranks) <= heap.num_bytes(),
               "the group or its region is outside the heap");
  FP4MOE_ASSIGN_OR_RETURN(auto made, make_unarmed(first_rank, num_ranks, rank, region));
  for (int r = 0; r < num_ranks; ++r) made->group_.regions[r] = heap.base(first_rank + r) + region.offset;
  made->group_.deadline_ns = static_cast<uint64_t>(timeout.count());
  made->ops_->arm(made->group_);
  return made;
}

Result<std::unique_ptr<DeviceCommunicator>> DeviceCommunicator::make_staged(std::unique_ptr<GroupPlane> plane,
                                                                            int first_rank, int num_ranks,
                                                                            int rank,
                                                                            const DeviceRegion& region) {
  FP4MOE_CHECK(rank >= 0 && rank < num_ranks && region.is_staged && region.offset == 0,
               "the group's rank or its region is invalid");
  FP4MOE_ASSIGN_OR_RETURN(auto made, make_unarmed(first_rank, num_ranks, rank, region));
  FP4MOE_ASSIGN_OR_RETURN(made->memory_, Buffer::make(region.num_bytes(num_ranks), device_memory()));
  std::fill_n(made->group_.regions, num_ranks, made->memory_.data());
  made->plane_ = std::move(plane);
  made->group_.plane = made->plane_.get();
  made->ops_->arm(made->group_);
  return made;
}

// Makes all but the regions' addresses and the deadline.
Result<std::unique_ptr<DeviceCommunicator>> DeviceCommunicator::make_unarmed(int first_rank, int num_ranks,
                                                                             int rank,
                                                                             const DeviceRegion& region) {
  if (num_ranks > kMaxGroupRanks)
    return unsupported("a group of " + std::to_string(num_ranks) + " GPUs is too large; the limit is " +
                       std::to_string(kMaxGroupRanks));
  const DeviceCommOps* const ops = cuda_comm_ops();
  if (ops == nullptr) return unsupported("ranks on GPUs: built without CUDA");
  std::unique_ptr<DeviceCommunicator> made(new DeviceCommunicator);
  FP4MOE_ASSIGN_OR_RETURN(made->verdict_, Buffer::make(int64_t{sizeof(CommVerdict)}, pinned_memory()));
  std::memset(made->verdict_.data(), 0, sizeof(CommVerdict));
  made->ops_ = ops;
  made->first_rank_ = first_rank;
  made->stream_ = current_stream().handle();
  CommGroup& group = made->group_;
  group.rank = rank;
  group.size = num_ranks;
  group.layout = region.layout(num_ranks);
  group.verdict = made->verdict_.as<CommVerdict>();
  group.max_blocks = ops->max_blocks();
  return made;
}

void DeviceCommunicator::rehearse(bool on) {
  rehearses_ = on;
  if (!on) ops_->arm(group_);
}

CommGroup DeviceCommunicator::view() const {
  if (!rehearses_) return group_;
  CommGroup alone = group_;
  alone.rank = 0;
  alone.size = 1;
  alone.regions[0] = group_.regions[group_.rank];
  alone.plane = nullptr;
  return alone;
}

CommGroup DeviceCommunicator::exchange_group() const {
  check_stream();
  return view();
}

void DeviceCommunicator::check_stream() const {
  FP4MOE_CHECK(current_stream().handle() == stream_,
               "an operation must be enqueued on the communicator's stream");
}

std::optional<PartialsToSend> DeviceCommunicator::partials_to_send(int64_t n) const {
  check_stream();
  const CommGroup group = view();
  if (!shares_memory() || bf16_partials_ || takes_two_shots(n) || n > max_sum_elements(group, false, false))
    return {};
  return PartialsToSend{.peers = partial_peers(group)};
}

void DeviceCommunicator::add_all_reduced(const CommOp& op, const float* partial, float* out, int64_t n,
                                         bool are_sent) const {
  check_stream();
  const CommGroup group = view();
  const bool two_shot = takes_two_shots(n);
  const int64_t most = max_sum_elements(group, bf16_partials_, two_shot);
  for (int64_t first = 0; first < n; first += most)
    ops_->all_reduce({.group = group,
                      .op = op,
                      .partial = partial + first,
                      .out = out + first,
                      .n = std::min(most, n - first),
                      .bf16_partials = bf16_partials_,
                      .two_shot = two_shot,
                      .are_sent = are_sent});
}

bool DeviceCommunicator::takes_two_shots(int64_t n) const {
  return !rehearses_ && shares_memory() && n * (bf16_partials_ ? 2 : 4) >= two_shot_bytes(size());
}

bool DeviceCommunicator::fuses_norm(int64_t rows, int64_t cols) const {
  return shares_memory() && cols % 4 == 0 && cols <= kMaxNormedCols && !takes_two_shots(rows * cols) &&
         cols <= max_sum_elements(group_, bf16_partials_, false);
}

void DeviceCommunicator::add_all_reduced_norm(const CommOp& op, const RowPartials& partials, float* out,
                                              const RmsNormArgs& norm) const {
  check_stream();
  const CommGroup group = view();
  const int64_t rows = norm.out_act.rows, cols = norm.out_act.cols;
  const int64_t most = max_sum_elements(group, bf16_partials_, false) / cols;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t at = first * cols;
    RmsNormArgs part = norm;
    part.x = out + at;
    part.out_act.rows = std::min(most, rows - first);
    if (part.out_act.data != nullptr) part.out_act.data = static_cast<bf16*>(part.out_act.data) + at;
    if (part.out_f32 != nullptr) part.out_f32 += at;
    MoeCombineArgs tokens;
    if (partials.experts != nullptr) {
      tokens = *partials.experts;
      tokens.row_of_slot += first * tokens.topk;
      if (tokens.weights != nullptr) tokens.weights += first * tokens.topk;
    }
    ops_->all_reduce_norm({.sum = {.group = group,
                                   .op = op,
                                   .partial = partials.rows == nullptr ? nullptr : partials.rows + at,
                                   .out = out + at,
                                   .n = part.out_act.rows * cols,
                                   .bf16_partials = bf16_partials_,
                                   .are_sent = partials.are_sent},
                           .norm = part,
                           .experts = partials.experts == nullptr ? nullptr : &tokens});
  }
}

bool DeviceCommunicator::shares_norm(int64_t rows, int64_t cols) const {
  return shares_memory() && size() > 1 && rows >= kLeastSharedRows && cols % 4 == 0 &&
         cols <= kMaxNormedCols && rows * cols * int64_t{sizeof(bf16)} <= normed_bytes() &&
         cols <= max_sum_elements(group_, bf16_partials_, false);
}

std::vector<int64_t> DeviceCommunicator::row_shares(int64_t rows) const {
  std::vector<int64_t> first;
  for (int r = 0; r <= size(); ++r)
    first.push_back(rehearses_ ? (r <= rank() ? 0 : rows) : rows * r / size());
  return first;
}

// The shares that an operation sees: those of all ranks, or this rank's in a rehearsal.
std::span<const int64_t> DeviceCommunicator::visible_shares(std::span<const int64_t> first) const {
  FP4MOE_CHECK(std::ssize(first) == size() + 1, "there must be one share per rank");
  return rehearses_ ? first.subspan(static_cast<size_t>(rank()), 2) : first;
}

// A rank receives the words of as many rows of its share at a time as fit in the heap.
void DeviceCommunicator::sum_norm_shares(const CommOp& op, const RowPartials& partials, float* out,
                                         const RmsNormArgs& norm, std::span<const int64_t> first) const {
  check_stream();
  FP4MOE_CHECK(!partials.are_sent, "the shares of a sum cannot be sent before it");
  const CommGroup group = view();
  ReduceNormGatherArgs args{.group = group,
                            .op = op,
                            .partial = partials.rows,
                            .experts = partials.experts,
                            .out = out,
                            .norm = norm,
                            .bf16_partials = bf16_partials_};
  const std::span<const int64_t> shares = visible_shares(first);
  std::copy(shares.begin(), shares.end(), args.first);
  int64_t rows = 0;
  for (size_t r = 1; r < shares.size(); ++r) rows = std::max(rows, shares[r] - shares[r - 1]);
  const int64_t most = max_sum_elements(group, bf16_partials_, false) / norm.out_act.cols;
  for (; args.skipped < rows; args.skipped += most) {
    args.rows = std::min(most, rows - args.skipped);
    ops_->reduce_norm_gather(args);
  }
}

void DeviceCommunicator::gather_columns(const CommOp& op, const void* mine, int64_t rows,
                                        std::span<const int64_t> first, void* out,
                                        const GatherPlaces& places) const {
  check_stream();
  const std::span<const int64_t> first_row = places.first_row;
  FP4MOE_CHECK(std::ssize(first) == size() + 1 && (first_row.empty() || std::ssize(first_row) == size()),
               "there must be one part per rank");
  const int64_t my_bytes = first[static_cast<size_t>(rank() + 1)] - first[static_cast<size_t>(rank())];
  const int64_t row_bytes = rehearses_ ? my_bytes : first.back();
  if (row_bytes == 0) return;
  const int64_t pitch = places.pitch.value_or(row_bytes);
  const CommGroup group = view();
  const int64_t most = group_.layout.gather_bytes / row_bytes;
  FP4MOE_CHECK(most > 0, "rows of " + std::to_string(row_bytes) + " bytes; the gather buffer has " +
                             std::to_string(group_.layout.gather_bytes));
  for (int64_t row = 0; row < rows; row += most) {
    GatherArgs args{.group = group,
                    .op = op,
                    .mine = static_cast<const uint8_t*>(mine) + row * my_bytes,
                    .out = static_cast<uint8_t*>(out) + row * pitch,
                    .pitch = pitch,
                    .rows = std::min(most, rows - row)};
    if (rehearses_)
      args.first[1] = my_bytes;
    else
      std::copy(first.begin(), first.end(), args.first);
    if (!first_row.empty() && rehearses_)
      args.first_row[0] = first_row[static_cast<size_t>(rank())];
    else
      std::copy(first_row.begin(), first_row.end(), args.first_row);
    ops_->gather(args);
  }
}

void DeviceCommunicator::gather_shares(const CommOp& op, const GatherRowsArgs& rows,
                                       std::span<const int64_t> first) const {
  check_stream();
  const CommGroup group = view();
  const std::span<const int64_t> shares = visible_shares(first);
  const int64_t most = group.layout.gather_bytes / rows.row_bytes;
  for (int64_t row = 0; row < rows.num_rows; row += most) {
    GatherSharesArgs args{.group = group,
                          .op = op,
                          .x = rows.x,
                          .out = static_cast<uint8_t*>(rows.out) + row * rows.row_bytes,
                          .rows = rows.rows + row,
                          .num_rows = std::min(most, rows.num_rows - row),
                          .row_bytes = rows.row_bytes};
    std::copy(shares.begin(), shares.end(), args.first);
    ops_->gather_shares(args);
  }
}

// Gathers the rows as columns of one row, as many rows at a time as fit in the gather buffer.
void DeviceCommunicator::gather_rows(const CommOp& op, const void* mine, int64_t row_bytes,
                                     std::span<const int64_t> first, void* out) const {
  FP4MOE_CHECK(std::ssize(first) == size() + 1, "there must be one part per rank");
  const int64_t most = group_.layout.gather_bytes / row_bytes;
  FP4MOE_CHECK(most > 0, "rows of " + std::to_string(row_bytes) + " bytes; the gather buffer has " +
                             std::to_string(group_.layout.gather_bytes));
  const int64_t own = first[static_cast<size_t>(rank())];
  std::vector<int64_t> parts(first.size());
  for (int64_t begin = 0; begin < first.back(); begin += most) {
    const int64_t end = std::min(begin + most, first.back());
    for (size_t r = 0; r < first.size(); ++r)
      parts[r] = (std::clamp(first[r], begin, end) - begin) * row_bytes;
    gather_columns(op, static_cast<const uint8_t*>(mine) + (std::clamp(own, begin, end) - own) * row_bytes, 1,
                   parts, static_cast<uint8_t*>(out) + begin * row_bytes);
  }
}

Status DeviceCommunicator::failure() const {
  if (!shares_memory()) return plane_->failure();
  auto* const verdict = const_cast<CommVerdict*>(verdict_.as<CommVerdict>());
  if (std::atomic_ref(verdict->is_set).load(std::memory_order_acquire) == 0) return {};
  const std::chrono::duration<double> limit = std::chrono::nanoseconds(group_.deadline_ns);
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.1f s", limit.count());
  std::string what = "rank " + std::to_string(first_rank_ + rank()) + " waited " + seconds + " for rank " +
                     std::to_string(first_rank_ + static_cast<int>(verdict->peer)) + " in " +
                     reinterpret_cast<const char*>(verdict->op);
  if (*of_model_ != '\0') what += std::string(" of ") + of_model_;
  if (verdict->layer >= 0) what += ", layer " + std::to_string(verdict->layer);
  what += ", epoch " + std::to_string(verdict->expected);
  if (verdict->seen != 0) what += ", seen " + std::to_string(verdict->seen);
  return {StatusCode::kDeadline, what};
}

}  // namespace fp4moe
