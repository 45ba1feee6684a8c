#include "engine/ranks/batch_stage.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t padded(int64_t num_bytes) { return (num_bytes + kAlign - 1) / kAlign * kAlign; }

int64_t packed_bytes(const StageLimits& l) {
  const int64_t rows = (l.accepts_drafts ? 4 : 2) * padded(l.max_rows * 4) +
                       (l.has_feature_rows ? 2 : 1) * padded(l.max_rows * 8);
  const int64_t sequences = (l.has_slots ? 7 : 2) * padded((l.max_sequences + 1) * 4);
  return rows + sequences + padded(l.max_logit_rows * 8);
}

}  // namespace

Result<BatchStage> BatchStage::make(const StageLimits& limits, MemoryResource& host, MemoryResource& device) {
  BatchStage stage;
  stage.limits_ = limits;
  stage.page_table_begin_ = packed_bytes(limits);
  const int64_t table_bytes = limits.max_sequences * limits.max_pages * 4;
  stage.window_table_begin_ = stage.page_table_begin_ + table_bytes;
  const int64_t num_bytes = stage.window_table_begin_ + (limits.has_window_pages ? table_bytes : 0);
  for (Buffer& side : stage.hosts_) {
    FP4MOE_ASSIGN_OR_RETURN(side, Buffer::make(num_bytes, host));
    std::memset(side.data(), 0, static_cast<size_t>(num_bytes));
  }
  FP4MOE_ASSIGN_OR_RETURN(stage.device_, Buffer::make(num_bytes, device));
  if (limits.accepts_drafts) {
    FP4MOE_ASSIGN_OR_RETURN(stage.distances_, Buffer::make(2 * limits.max_logit_rows * 4, device));
  }
  return stage;
}

template <class T>
T* BatchStage::take(int64_t count, const T** on_device) {
  T* on_host = reinterpret_cast<T*>(host().data() + used_);
  *on_device = reinterpret_cast<const T*>(device_.data() + used_);
  used_ += padded(count * static_cast<int64_t>(sizeof(T)));
  return on_host;
}

DeviceBatch BatchStage::write(const Batch& batch, int64_t num_rows) {
  const int64_t t = std::ssize(batch.token_ids);
  const bool decode = decodes(batch);
  DeviceBatch out;
  out.num_rows = num_rows;
  out.num_sequences = decode ? num_rows : std::ssize(batch.sequences);
  out.num_logit_rows = decode ? num_rows : std::ssize(batch.logit_rows);
  out.largest_rows = out.num_rows;
  out.largest_logit_rows = out.num_logit_rows;
  out.max_pages = limits_.max_pages;
  FP4MOE_CHECK(t <= num_rows && num_rows <= limits_.max_rows && out.num_sequences <= limits_.max_sequences &&
                   out.num_logit_rows <= limits_.max_logit_rows,
               "a step of " + std::to_string(num_rows) + " rows, " + std::to_string(out.num_sequences) +
                   " sequences and " + std::to_string(out.num_logit_rows) + " logit rows does not fit");
  used_ = 0;
  int32_t* ids = take(num_rows, &out.token_ids);
  int32_t* row_sequence = take(num_rows, &out.row_sequence);
  int64_t* positions = take(num_rows, &out.positions);
  int32_t* first_row = take(out.num_sequences + 1, &out.first_row);
  int32_t* first_position = take(out.num_sequences, &out.first_position);
  int64_t* logit_rows = take(out.num_logit_rows, &out.logit_rows);
  if (limits_.has_slots) write_states(batch, out);
  if (limits_.has_feature_rows) write_feature_rows(batch, out);
  FP4MOE_CHECK(
      limits_.accepts_drafts || std::ranges::all_of(batch.moves, [](RowsMove m) { return m.row < 0; }),
      "rows that move in a stage that accepts no drafts");
  if (limits_.accepts_drafts) write_moves(batch, num_rows);
  accepted_.token_ids = out.token_ids;
  accepted_.num_rows = t;
  out.page_table = reinterpret_cast<const int32_t*>(device_.data() + page_table_begin_);
  if (limits_.has_window_pages)
    out.window_page_table = reinterpret_cast<const int32_t*>(device_.data() + window_table_begin_);

  std::copy_n(batch.token_ids.begin(), t, ids);
  std::copy_n(batch.positions.begin(), t, positions);
  std::fill(ids + t, ids + num_rows, 0);
  std::fill(positions + t, positions + num_rows, 0);
  std::fill(row_sequence, row_sequence + num_rows, -1);
  std::fill(first_row, first_row + out.num_sequences + 1, static_cast<int32_t>(t));
  std::fill(first_position, first_position + out.num_sequences, 0);
  used_pages_ = used_page_rows_ = 0;
  const auto add = [&](const SequenceRows& rows) {
    const int64_t s = used_page_rows_++;
    std::fill_n(row_sequence + rows.first_row, rows.num_rows, static_cast<int32_t>(s));
    first_row[s] = static_cast<int32_t>(rows.first_row);
    first_position[s] = static_cast<int32_t>(rows.first_position);
    out.max_rows = std::max(out.max_rows, rows.num_rows);
    write_tables(rows, s);
  };
  for (const SequenceRows& rows : batch.sequences) {
    if (!decode) add(rows);
    for (int64_t i = 0; decode && i < rows.num_rows; ++i)
      add({rows.first_row + i, 1, rows.first_position + i, rows.page_table, rows.window_page_table});
  }
  out.max_rows = std::max<int64_t>(out.max_rows, 1);
  for (int64_t i = 0; i < out.num_logit_rows; ++i)
    logit_rows[i] = decode ? i : batch.logit_rows[static_cast<size_t>(i)];
  return out;
}

// A graph serves every number of replayed rows and drafts, and every distribution of its rows to sequences.
void BatchStage::write_states(const Batch& batch, DeviceBatch& out) {
  const int64_t count = std::ssize(batch.sequences), per_request = limits_.rows_per_request;
  const int64_t most_requests = std::max<int64_t>(limits_.max_logit_rows / per_request, 1);
  const bool decode = decodes(batch);
  DeviceStates& states = out.states;
  states.num_sequences = decode ? std::min(out.num_rows, most_requests) : count;
  states.max_rows = decode ? per_request : 1;
  FP4MOE_CHECK(count <= states.num_sequences,
               std::to_string(count) + " sequences; legal: at most " + std::to_string(states.num_sequences));
  const auto fill = [&](int64_t size, const int32_t** on_device, int64_t padding, const auto& value) {
    int32_t* values = take(size, on_device);
    for (const SequenceRows& rows : batch.sequences) *values++ = static_cast<int32_t>(value(rows));
    std::fill_n(values, size - count, static_cast<int32_t>(padding));
  };
  const int64_t n = states.num_sequences;
  fill(n + 1, &states.first_row, std::ssize(batch.token_ids),
       [](const auto& rows) { return rows.first_row; });
  fill(n, &states.first_position, 0, [](const auto& rows) { return rows.first_position; });
  fill(n, &states.slots, 0, [](const auto& rows) { return rows.slot; });
  fill(n, &states.num_replayed, 0, [](const auto& rows) { return rows.num_replayed; });
  fill(n, &states.num_tentative, 0, [](const auto& rows) { return rows.num_tentative; });
  for (const SequenceRows& rows : batch.sequences) {
    states.max_rows = std::max(states.max_rows, rows.num_rows);
    FP4MOE_CHECK(std::max(rows.num_replayed, rows.num_tentative) < per_request &&
                     rows.num_replayed < std::max<int64_t>(rows.first_position, 1) &&
                     rows.num_tentative < std::max<int64_t>(rows.num_rows, 1),
                 std::to_string(rows.num_replayed) + " replayed rows and " +
                     std::to_string(rows.num_tentative) + " drafts among " + std::to_string(rows.num_rows) +
                     " rows from position " + std::to_string(rows.first_position) +
                     " on; a step has at most " + std::to_string(per_request) + " rows of a request");
  }
}

// Rows without features take those of row 0: padding, and rows of a model that takes none.
void BatchStage::write_feature_rows(const Batch& batch, DeviceBatch& out) {
  const auto given = batch.feature_rows;
  FP4MOE_CHECK(
      given.empty() || given.size() == batch.token_ids.size(),
      std::to_string(given.size()) + " feature rows for " + std::to_string(batch.token_ids.size()) + " rows");
  int64_t* rows = take(out.num_rows, &out.feature_rows);
  std::fill(std::copy(given.begin(), given.end(), rows), rows + out.num_rows, 0);
}

// Row r's distance is the index r among the distances, and its number of right drafts max_logit_rows + r.
void BatchStage::write_moves(const Batch& batch, int64_t num_rows) {
  int32_t* moves = take(num_rows, &accepted_.moves);
  int32_t* num_drafts = take(num_rows, &accepted_.num_drafts);
  std::fill(moves, moves + num_rows, 0);
  std::fill(num_drafts, num_drafts + num_rows, 0);
  const bool decode = decodes(batch);
  accepted_.has_moves = false;
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceRows& rows = batch.sequences[s];
    if (decode) num_drafts[rows.first_row] = static_cast<int32_t>(rows.num_rows - 1);
    if (batch.moves.empty() || batch.moves[s].row < 0) continue;
    const RowsMove& move = batch.moves[s];
    FP4MOE_CHECK(decode && move.row < limits_.max_logit_rows,
                 "rows that move by row " + std::to_string(move.row) + " in a step that " +
                     (decode ? "decodes" : "does not decode"));
    accepted_.has_moves = true;
    const int64_t index = move.row + (move.follows ? limits_.max_logit_rows : 0);
    for (int64_t i = 0; i < rows.num_rows; ++i)
      moves[rows.first_row + i] = move_code(index, i < move.num_ids);
  }
}

// In a decode batch row t is sequence t.
void BatchStage::move_rows(const DeviceBatch& batch) const {
  cuda_move_rows()({.distances = distances_.as<int32_t>(),
                    .moves = const_cast<int32_t*>(accepted_.moves),
                    .token_ids = const_cast<int32_t*>(batch.token_ids),
                    .positions = const_cast<int64_t*>(batch.positions),
                    .first_position = const_cast<int32_t*>(batch.first_position),
                    .feature_rows = const_cast<int64_t*>(batch.feature_rows),
                    .num_rows = accepted_.num_rows});
}

void BatchStage::move_randoms(SampleRowParams* params) const {
  if (!accepted_.has_moves) return;
  cuda_move_randoms()({.params = params, .moves = accepted_.moves, .num_rows = accepted_.num_rows});
}

void BatchStage::accept_drafts(SampledRow* sampled, SampledRow* copy) const {
  FP4MOE_CHECK(limits_.accepts_drafts && accepted_.num_rows <= limits_.max_logit_rows,
               std::to_string(accepted_.num_rows) + " rows cannot have drafts");
  cuda_accept_drafts()({.sampled = sampled,
                        .copy = copy,
                        .token_ids = accepted_.token_ids,
                        .num_drafts = accepted_.num_drafts,
                        .moves = accepted_.moves,
                        .num_rows = accepted_.num_rows,
                        .distances = distances_.as<int32_t>(),
                        .right = limits_.max_logit_rows});
}

void BatchStage::write_tables(const SequenceRows& rows, int64_t sequence) {
  FP4MOE_CHECK(std::ssize(rows.page_table) <= limits_.max_pages, "a sequence has too many pages");
  const auto write = [&](std::span<const int32_t> table, int64_t begin) {
    auto* pages = reinterpret_cast<int32_t*>(host().data() + begin);
    std::copy(table.begin(), table.end(), pages + sequence * limits_.max_pages);
  };
  write(rows.page_table, page_table_begin_);
  used_pages_ = std::max(used_pages_, std::ssize(rows.page_table));
  if (!limits_.has_window_pages) return;
  FP4MOE_CHECK(rows.window_page_table.size() <= rows.page_table.size(),
               "a sequence has " + std::to_string(rows.window_page_table.size()) + " window pages but only " +
                   std::to_string(rows.page_table.size()) + " full pages");
  write(rows.window_page_table, window_table_begin_);
}

// The copy of the used part of a page table, or of nothing.
HostRows BatchStage::table_copy(int64_t begin, bool is_used) {
  return {.to = device_.data() + begin,
          .from = host().data() + begin,
          .stride_bytes = limits_.max_pages * 4,
          .row_bytes = used_pages_ * 4,
          .num_rows = is_used ? used_page_rows_ : 0};
}

DeviceBatch BatchStage::put(const Batch& batch, int64_t num_rows) {
  side_ ^= 1;
  const DeviceBatch out = write(batch, num_rows);
  cuda_copy_from_host()({{{.to = device_.data(), .from = host().data(), .row_bytes = used_, .num_rows = 1},
                          table_copy(page_table_begin_, true),
                          table_copy(window_table_begin_, limits_.has_window_pages)}});
  if (accepted_.has_moves) move_rows(out);
  return out;
}

bool BatchStage::decodes(const Batch& batch) const {
  return batch.logit_rows.size() == batch.token_ids.size() &&
         std::ranges::all_of(batch.sequences, [this](const SequenceRows& rows) {
           return rows.num_rows <= limits_.rows_per_request;
         });
}

std::vector<int64_t> decode_buckets(int64_t max_requests, std::span<const int64_t> given,
                                    int64_t rows_per_request) {
  const int64_t max_rows = max_requests * rows_per_request;
  std::vector<int64_t> buckets;
  if (!given.empty()) {
    buckets.assign(given.begin(), given.end());
    for (const int64_t requests : given) buckets.push_back(requests * rows_per_request);
  } else {
    buckets = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64};
    for (int64_t rows = 96; rows < max_rows;
         rows += rows < max_requests ? 32 : std::max<int64_t>(rows / 8 / 32 * 32, 32))
      buckets.push_back(rows);
    buckets.insert(buckets.end(), {max_requests, max_rows});
  }
  std::erase_if(buckets, [max_rows](int64_t rows) { return rows < 1 || rows > max_rows; });
  std::sort(buckets.begin(), buckets.end());
  buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
  return buckets;
}

int64_t bucket_for(std::span<const int64_t> buckets, int64_t num_rows) {
  const auto at = std::lower_bound(buckets.begin(), buckets.end(), num_rows);
  return at == buckets.end() ? num_rows : *at;
}

}  // namespace fp4moe
