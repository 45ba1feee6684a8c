// LmHead: hidden rows -> logits. Ranks that share a head each have a part of the vocabulary; on GPUs they
// gather the logits only if sampling needs all of them (gather_logits).
#pragma once

#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/ops.h"
#include "model/linear_layer.h"
#include "model/rank_context.h"

namespace fp4moe {

class WeightLoader;

struct LmHeadOptions {
  RankContext rank;
  bool whole_job = false;   // shard the vocabulary over all ranks instead of within each attention group
  int64_t max_rows = 0;     // most rows per call, over all groups
  int64_t hidden_size = 0;  // H
  int64_t vocab_size = 0;   // V
  DType act_dtype = DType::kBF16;
};

// Part `index` of V rows split into `parts`, in whole panels of 16 (the last may be short).
Shard vocab_shard(int64_t vocab_size, int64_t parts, int64_t index);

// Gathers `rows` rows of logits from the ranks that share an LM head on GPUs (RankContext::device_head). Each
// rank has the columns of its vocab_shard(). `part` is what forward_lm_head() writes, `logits` [rows, V], in
// device memory. first_row: by rank, the row of `part` where its group's rows begin; empty: all have the same
// rows.
void gather_logits(const DeviceCommunicator& head, int64_t vocab_size, const float* part, int64_t rows,
                   std::span<const int64_t> first_row, float* logits);

// On GPUs, for ranks that share a head: they, as the group of the model that runs (a draft model may run its
// target's head), and the rows of the largest group of ranks or more, the same on all ranks.
struct HeadSharers {
  const DeviceCommunicator* ranks = nullptr;
  int64_t group_rows = 0;
};

// The first of a group's rows among those of all groups that share a head; `rank`: any rank of the group.
constexpr int64_t first_head_row(const RankLayout& layout, int rank, int64_t group_rows) {
  return rank / layout.attention_tp() * group_rows;
}

class LmHead {
 public:
  LmHead() = default;
  // name: "lm_head", or the embedding's name if they are tied.
  static Result<LmHead> load(WeightLoader& loader, const std::string& name, const LmHeadOptions& options);

  int64_t weight_bytes() const { return linear_.weight_bytes(); }
  int64_t scratch_bytes() const;
  // logits [rows, V] f32 = x W^T, where x [rows, H] are the group's normed rows; `logits` is null if this
  // rank needs none. norm.out_act is unspecified afterwards. All ranks that share the head must call it, even
  // with 0 rows. On GPUs they write only the columns of their vocab_shard(), as [rows, shard]. If all groups
  // share the head, the rows are those of all groups, sharers.group_rows of each, and norm.out_act has memory
  // for group_rows rows; the last rows of a smaller group are unspecified.
  Status forward_lm_head(const RmsNormArgs& norm, const HeadSharers& sharers, float* logits, Arena& scratch,
                         ThreadPool& pool) const;

 private:
  // The rows of all groups, and the range of the rows of this rank's group.
  struct JobRows {
    ActRows all;
    Shard own;
  };
  Result<JobRows> gather_rows(const ActRows& x, Arena& scratch) const;
  void device_logits(const RmsNormArgs& norm, const HeadSharers& sharers, float* part, Arena& scratch,
                     ThreadPool& pool) const;
  ActRows gather_device_rows(const ActRows& x, const HeadSharers& sharers, Arena& scratch) const;
  Status shared_logits(const JobRows& rows, float* logits, Arena& scratch, ThreadPool& pool) const;
  Communicator* sharers() const { return options_.whole_job ? options_.rank.world : options_.rank.attention; }
  int num_sharers() const;

  const DenseOps* ops_ = nullptr;
  LmHeadOptions options_;
  LinearLayer linear_;  // [vocab_shard, H]
};

}  // namespace fp4moe
