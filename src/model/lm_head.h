// LmHead: hidden rows -> logits. Ranks that share a head have a part of the vocabulary each.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/ops.h"
#include "model/linear_layer.h"
#include "model/rank_context.h"

namespace fp4moe {

class WeightLoader;

struct LmHeadOptions {
  RankContext rank;
  bool whole_job = false;   // the vocabulary is shared by all ranks, not by each attention group
  int64_t max_rows = 0;     // of one call, all groups together
  int64_t hidden_size = 0;  // H
  int64_t vocab_size = 0;   // V
  DType act_dtype = DType::kBF16;
};

// The part of V rows that is `index`'s of `parts`: whole panels of 16 as far as they go.
Shard vocab_shard(int64_t vocab_size, int64_t parts, int64_t index);

class LmHead {
 public:
  LmHead() = default;
  // name: "lm_head", or the embedding where the two are tied.
  static Result<LmHead> load(WeightLoader& loader, const std::string& name, const LmHeadOptions& options);

  int64_t weight_bytes() const { return linear_.weight_bytes(); }
  int64_t scratch_bytes() const;
  // logits [rows, V] f32 = x W^T, x [rows, H] being the group's rows, normed; what norm.out_act holds
  // afterwards is unspecified. Null: not wanted on this rank. Ranks that share the head call it together,
  // with 0 rows too.
  Status forward(const RmsNormArgs& norm, float* logits, Arena& scratch, ThreadPool& pool) const;

 private:
  // The rows of all groups, and which of them are this rank's.
  struct JobRows {
    ActRows all;
    Shard own;
  };
  Result<JobRows> gather_rows(const ActRows& x, Arena& scratch) const;
  Status shared_logits(const JobRows& rows, float* logits, Arena& scratch, ThreadPool& pool) const;
  Communicator* sharers() const { return options_.whole_job ? options_.rank.world : options_.rank.attention; }
  int num_sharers() const;

  const DenseOps* ops_ = nullptr;
  LmHeadOptions options_;
  LinearLayer linear_;  // [vocab_shard, H]
};

}  // namespace fp4moe
