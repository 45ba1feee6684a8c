#include "model/lm_head.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

constexpr int64_t kLogitRowsPerPass = 64;  // gathered at a time on a CPU, which bounds the memory

}  // namespace

Shard vocab_shard(int64_t vocab_size, int64_t parts, int64_t index) {
  return output_shard(vocab_size, parts, index);
}

// Every rank of a group gets its logits, so that each chooses the tokens without further communication.
void gather_logits(const DeviceCommunicator& head, int64_t vocab_size, const float* part, int64_t rows,
                   std::span<const int64_t> first_row, float* logits) {
  std::vector<int64_t> first;  // start of each rank's columns, in bytes
  for (int r = 0; r < head.size(); ++r)
    first.push_back(vocab_shard(vocab_size, head.size(), r).first * int64_t{sizeof(float)});
  first.push_back(vocab_size * int64_t{sizeof(float)});
  head.gather_columns({"logits"}, part, rows, first, logits, {.first_row = first_row});
}

int LmHead::num_sharers() const {
  const RankLayout& layout = options_.rank.layout;
  return options_.whole_job ? layout.tp : layout.attention_tp();
}

Result<LmHead> LmHead::load(WeightLoader& loader, const std::string& name, const LmHeadOptions& options) {
  LmHead head;
  head.ops_ = &loader.ops();
  head.options_ = options;
  const RankLayout& layout = options.rank.layout;
  const Shard shard = vocab_shard(options.vocab_size, head.num_sharers(),
                                  options.whole_job ? layout.rank : layout.attention_rank());
  FP4MOE_ASSIGN_OR_RETURN(LinearWeightsView view,
                          loader.view(name, {options.vocab_size, options.hidden_size}));
  if (shard.count == 0) return head;
  std::vector<int64_t> rows;
  if (view.weight != nullptr) {  // consecutive rows of bf16 need no copy
    view.weight += shard.first * options.hidden_size;
    view.n = shard.count;
  } else if (shard.count < options.vocab_size) {
    rows = row_range(shard.first, shard.count);
  }
  FP4MOE_ASSIGN_OR_RETURN(head.linear_, loader.linear({LinearPart{view, std::move(rows), {}}}));
  return head;
}

int64_t LmHead::scratch_bytes() const {
  const int64_t hidden_bytes = options_.hidden_size * dtype_bits(options_.act_dtype) / 8;
  const int64_t rows = linear_.scratch_bytes(std::max(kLogitRowsPerPass, options_.max_rows)) +
                       (options_.whole_job ? Arena::padded(options_.max_rows * hidden_bytes) : 0);
  if (num_sharers() == 1 || options_.rank.device_head != nullptr) return rows;
  return rows + Arena::padded(kLogitRowsPerPass * linear_.n() * 4) +
         Arena::padded(kLogitRowsPerPass * options_.vocab_size * 4);
}

Status LmHead::forward_lm_head(const RmsNormArgs& norm, const HeadSharers& sharers, float* logits,
                               Arena& scratch, ThreadPool& pool) const {
  if (num_sharers() == 1) {
    if (logits != nullptr) linear_.forward_normed(norm, logits, scratch, pool);
    return {};
  }
  if (sharers.ranks != nullptr) {
    device_logits(norm, sharers, logits, scratch, pool);
    return {};
  }
  const ActRows& x = norm.out_act;
  run_norm(*ops_, norm, pool);
  if (!options_.whole_job) return shared_logits({x, {0, x.rows}}, logits, scratch, pool);
  FP4MOE_ASSIGN_OR_RETURN(const JobRows rows, gather_rows(x, scratch));
  return shared_logits(rows, logits, scratch, pool);
}

void LmHead::device_logits(const RmsNormArgs& norm, const HeadSharers& sharers, float* part, Arena& scratch,
                           ThreadPool& pool) const {
  const ActRows& x = norm.out_act;
  if (!options_.whole_job) {
    if (x.rows > 0 && linear_.n() > 0) linear_.forward_normed(norm, part, scratch, pool);
    return;
  }
  if (sharers.group_rows == 0) return;
  if (x.rows > 0) run_norm(*ops_, norm, pool);
  const ActRows all = gather_device_rows(x, sharers, scratch);
  if (linear_.n() > 0) linear_.forward_linear(all, part, /*accumulate=*/false, scratch, pool);
}

// Each rank of a group sends its share of the group's rows.
ActRows LmHead::gather_device_rows(const ActRows& x, const HeadSharers& sharers, Arena& scratch) const {
  const RankLayout& layout = options_.rank.layout;
  const int64_t ranks = layout.attention_tp(), row_bytes = x.cols * dtype_bits(x.dtype) / 8;
  const int64_t num_rows = layout.dp * sharers.group_rows;
  const ActRows all = {scratch.take<uint8_t>(num_rows * row_bytes), x.dtype, num_rows, x.cols};
  // Where a rank's share of its group's rows begins.
  const auto share = [&](int rank) { return rank % ranks * sharers.group_rows / ranks; };
  std::vector<int64_t> first;
  for (int r = 0; r <= layout.tp; ++r)
    first.push_back(first_head_row(layout, r, sharers.group_rows) + share(r));
  const int64_t own = share(layout.rank);
  sharers.ranks->gather_rows({"lm_head_rows"}, static_cast<uint8_t*>(x.data) + own * row_bytes, row_bytes,
                             first, all.data);
  return all;
}

// Every rank of a group has the group's rows; the group's first rank sends them.
Result<LmHead::JobRows> LmHead::gather_rows(const ActRows& x, Arena& scratch) const {
  const RankLayout& layout = options_.rank.layout;
  Communicator& world = *options_.rank.world;
  const size_t num_ranks = static_cast<size_t>(layout.tp);
  const int64_t row_bytes = x.cols * dtype_bits(x.dtype) / 8;
  std::vector<int64_t> counts(num_ranks);
  const int64_t sizes[] = {options_.vocab_size, x.cols};
  const OpName op = {"lm_head", -1, geometry_hash(sizes)};
  FP4MOE_RETURN_IF_ERROR(world.exchange(op, &x.rows, sizeof x.rows, counts.data()));
  JobRows rows{{nullptr, x.dtype, 0, x.cols}, {0, x.rows}};
  for (size_t r = 0; r < num_ranks; ++r) {
    if (static_cast<int>(r) % layout.attention_tp() != 0) counts[r] = 0;
    if (static_cast<int>(r) < layout.rank - layout.attention_rank()) rows.own.first += counts[r];
    rows.all.rows += counts[r];
    counts[r] *= row_bytes;
  }
  FP4MOE_CHECK(
      rows.all.rows <= options_.max_rows,
      std::to_string(rows.all.rows) + " logit rows; the limit is " + std::to_string(options_.max_rows));
  rows.all.data = scratch.take<uint8_t>(rows.all.rows * row_bytes);
  if (rows.all.rows == 0) return rows;
  FP4MOE_RETURN_IF_ERROR(world.all_gather({"lm_head_rows", -1, op.geometry}, x.data, counts, rows.all.data));
  return rows;
}

Status LmHead::shared_logits(const JobRows& rows, float* logits, Arena& scratch, ThreadPool& pool) const {
  const int64_t v = options_.vocab_size, parts = num_sharers();
  const int64_t row_bytes = rows.all.cols * dtype_bits(rows.all.dtype) / 8;
  float* part = scratch.take<float>(kLogitRowsPerPass * linear_.n());
  float* gathered = scratch.take<float>(kLogitRowsPerPass * v);
  std::vector<int64_t> counts(static_cast<size_t>(parts));
  for (int64_t first = 0; first < rows.all.rows; first += kLogitRowsPerPass) {
    const int64_t n = std::min(kLogitRowsPerPass, rows.all.rows - first);
    const ActRows x = {static_cast<uint8_t*>(rows.all.data) + first * row_bytes, rows.all.dtype, n,
                       rows.all.cols};
    if (linear_.n() > 0) linear_.forward_linear(x, part, /*accumulate=*/false, scratch, pool);
    for (int64_t r = 0; r < parts; ++r)
      counts[static_cast<size_t>(r)] = n * vocab_shard(v, parts, r).count * int64_t{sizeof(float)};
    const int64_t sizes[] = {n, v};
    FP4MOE_RETURN_IF_ERROR(
        sharers()->all_gather({"logits", -1, geometry_hash(sizes)}, part, counts, gathered));
    if (logits == nullptr) continue;
    const float* source = gathered;
    for (int64_t r = 0; r < parts; ++r) {
      const Shard shard = vocab_shard(v, parts, r);
      for (int64_t i = 0; i < n; ++i, source += shard.count) {
        const int64_t row = first + i - rows.own.first;
        if (row < 0 || row >= rows.own.count) continue;
        std::memcpy(logits + row * v + shard.first, source, static_cast<size_t>(shard.count) * sizeof(float));
      }
    }
  }
  return {};
}

}  // namespace fp4moe
