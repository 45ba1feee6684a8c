// Model: immutable weights and one forward pass over a batch of rows of several sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "fp4moe/sinks.h"
#include "io/checkpoint.h"
#include "io/model_config.h"
#include "kernels/ops.h"
#include "model/kv_cache.h"
#include "model/rank_context.h"
#include "moe/expert_counters.h"
#include "moe/plan.h"

namespace fp4moe {

struct ModelOptions {
  DType act_dtype = DType::kBF16;  // kBF16, or kF32: the reference ops, every sum in double
  Isa isa = Isa::kScalar;          // of a CPU's dense ops with kBF16
  MoePlan moe_plan;                // of every MoE layer; its problem says on which device
  int64_t max_batch_tokens = 0;    // most rows of one forward()
  int64_t max_logit_rows = 0;  // most logit rows of one forward(), all groups together; 0: max_batch_tokens
  // dp > 1: each group has a whole LM head; else all ranks share one.
  bool dp_lm_head = false;
  RankContext rank;
  DenseQuant dense_quant = DenseQuant::kNone;  // of a CPU
};

// T rows, sequence after sequence. Ids and positions were checked by the caller.
struct Batch {
  std::span<const int32_t> token_ids;       // [T]
  std::span<const int64_t> positions;       // [T]
  std::span<const SequenceRows> sequences;  // covers the T rows in order
  std::span<const int64_t> logit_rows;      // rows whose logits are wanted, ascending
  // Or null: [layers, T, K] in the ops' memory (there with padded T), filled with the experts that each row
  // goes to, best first; in the last layer only logit rows do, whose places are first. Layers without experts
  // are left as they are. On the host where the batch goes to an executor.
  int32_t* routed_experts = nullptr;
  const DeviceBatch* device = nullptr;  // on a GPU: the same there, padded; the spans may then be empty

  int64_t num_rows() const { return device != nullptr ? device->num_rows : std::ssize(token_ids); }
  int64_t num_logit_rows() const {
    return device != nullptr ? device->num_logit_rows : std::ssize(logit_rows);
  }
  // What the ops read: in their memory.
  const int32_t* op_token_ids() const { return device != nullptr ? device->token_ids : token_ids.data(); }
  ChosenTokens op_chosen() const { return device != nullptr ? device->chosen : ChosenTokens{}; }
  const int64_t* op_positions() const { return device != nullptr ? device->positions : positions.data(); }
  const int64_t* op_logit_rows() const { return device != nullptr ? device->logit_rows : logit_rows.data(); }
};

class Model {
 public:
  // Reads, checks and packs the weights layer by layer. The checkpoint may be closed afterwards.
  static Result<std::unique_ptr<Model>> load(const Checkpoint& checkpoint, const ModelConfig& config,
                                             const ModelOptions& options, ThreadPool& pool,
                                             const ProgressSink& progress);
  virtual ~Model() = default;

  virtual const ModelConfig& config() const = 0;
  virtual int64_t weight_bytes() const = 0;
  // Where the tokens that this rank routed went.
  virtual const ExpertCounters& expert_counters() const = 0;
  // Appends the rows' keys and values to `kv` and writes logits [logit_rows.size(), V], f32. Not
  // re-entrant: one forward() at a time (it uses the model's scratch memory).
  // With several ranks an error is the job's: a rank that failed or did not come in time. Every rank of a
  // group passes the same batch; logits may be null on all but the group's first rank.
  virtual Status forward(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) = 0;
};

}  // namespace fp4moe
