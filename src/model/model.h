// Model: immutable weights and one forward pass over a batch of rows of several sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "fp4moe/expert_moves.h"
#include "fp4moe/sinks.h"
#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"
#include "kernels/ops.h"
#include "model/kv_cache.h"
#include "model/rank_context.h"
#include "moe/expert_counters.h"
#include "moe/placement/expert_placement.h"
#include "moe/plan/plan.h"

namespace fp4moe {

class LmHead;

// What a target's forward pass keeps of each of its rows for a draft model.
struct FeatureOptions {
  bool is_final_norm = false;         // the last layer's output after the final norm, [H] (MTP)
  std::vector<int64_t> after_layers;  // the residual after each of these layers (0-based), [n, H] (EAGLE-3)
  bool is_empty() const { return !is_final_norm && after_layers.empty(); }
};

// Rows of a model's last forward pass in the ops' memory: after_layers in their order, then the final norm.
// Null data if it keeps none. On a GPU the rows include padding, and a replayed graph has its batch's rows.
struct Features {
  const void* data = nullptr;  // [num_rows, width] dtype
  DType dtype = DType::kF32;
  int64_t num_rows = 0, width = 0;
};

// Weights that a draft model may share with its target; null: the model has none to share.
struct SharedWeights {
  const bf16* embedding = nullptr;  // [V, H] in the ops' memory
  const LmHead* lm_head = nullptr;
};

struct ModelOptions {
  DType act_dtype = DType::kBF16;  // kBF16, or kF32: the reference ops, which sum in double
  DType kv_dtype = DType::kBF16;   // of the KvCache; kF8E4M3: the layers' scales are loaded
  Isa isa = Isa::kScalar;          // instruction set of the dense ops on a CPU with kBF16
  MoePlan moe_plan;                // for all MoE layers; its problem names the device
  int64_t max_batch_tokens = 0;    // most rows per forward_model()
  // Most logit rows per forward_model(), over all groups; 0: max_batch_tokens per group
  int64_t max_logit_rows = 0;
  // dp > 1: each group has its own LM head; false: all ranks share one.
  bool dp_lm_head = false;
  RankContext rank;
  DenseQuant dense_quant = DenseQuant::kNone;  // kQ8: CPU only
  FeatureOptions features;                     // of a target with a draft model
  // Load each part, with all checks, and drop it: the result is good for nothing but its errors.
  bool checks_only = false;
  std::shared_ptr<const ExpertPlacements> placements;  // ModelPlan::placements
};

// The model that a batch is for.
enum class BatchModel : int32_t { kTarget, kDraft };

// A sequence whose rows depend on how many drafts of a step are right, which only the device knows: its batch
// is planned as if none were, and the device moves its rows by the number of right drafts after a row of
// logits of the step last sampled.
struct RowsMove {
  int32_t row = -1;      // that row; -1: the rows stay
  bool follows = false;  // false: the rows are those of the step itself, which move as far as it was moved
  int32_t num_ids = 0;   // of its first rows, whose ids ~r become ~(r + distance) and feature rows move too
};

// T rows, sequence after sequence. The caller has checked ids and positions.
struct Batch {
  std::span<const int32_t> token_ids;       // [T]
  std::span<const int64_t> positions;       // [T]
  std::span<const SequenceRows> sequences;  // covers the T rows in order
  std::span<const int64_t> logit_rows;      // rows whose logits are computed, ascending
  // null, or out [layers, T, K] in the ops' memory (on a GPU with padded T): each row's experts, best first.
  // The last layer writes only the logit rows, at the start of its rows; layers without experts write
  // nothing. In a batch for an Executor it is in host memory.
  int32_t* routed_experts = nullptr;
  const DeviceBatch* device =
      nullptr;  // GPU: the batch in device memory, padded; the spans may then be empty
  BatchModel model = BatchModel::kTarget;
  // kDraft, for a model that continues the target's features (FeatureOptions): row t takes the features of
  // row feature_rows[t] of the target's last forward pass or, if chains, of the draft model's last pass. [T];
  // empty for a draft model that takes tokens alone.
  std::span<const int64_t> feature_rows = {};
  bool chains = false;
  // A batch without rows, of a step that moves experts instead of running the target.
  bool moves_experts = false;
  std::span<const StateCopy> state_copies = {};  // run before the rows, in order; a batch may have only these
  // For an Executor that accepts drafts: [sequences], or empty if all rows stay. Page tables cover the rows
  // wherever they move to. All rows have logits.
  std::span<const RowsMove> moves = {};

  int64_t num_rows() const { return device != nullptr ? device->num_rows : std::ssize(token_ids); }
  int64_t num_logit_rows() const {
    return device != nullptr ? device->num_logit_rows : std::ssize(logit_rows);
  }
  // Pointers for the ops, in their memory.
  const int32_t* op_token_ids() const { return device != nullptr ? device->token_ids : token_ids.data(); }
  ChosenTokens op_chosen() const { return device != nullptr ? device->chosen : ChosenTokens{}; }
  const int64_t* op_positions() const { return device != nullptr ? device->positions : positions.data(); }
  const int64_t* op_logit_rows() const { return device != nullptr ? device->logit_rows : logit_rows.data(); }
  const int64_t* op_feature_rows() const {
    return device != nullptr ? device->feature_rows : feature_rows.data();
  }
};

class Model {
 public:
  // Loads, checks and packs the weights layer by layer. The checkpoint may be closed afterwards.
  static Result<std::unique_ptr<Model>> load(const Checkpoint& checkpoint, const ModelConfig& config,
                                             const ModelOptions& options, ThreadPool& pool,
                                             const ProgressSink& progress);
  virtual ~Model() = default;

  virtual const ModelConfig& config() const = 0;
  virtual int64_t weight_bytes() const = 0;
  // Counts of the tokens that this rank has routed.
  virtual const ExpertCounters& expert_counters() const = 0;
  // Appends the rows' keys and values to `kv` and writes logits [logit_rows.size(), V] f32; ranks on GPUs
  // that share an LM head write only the columns of their vocab_shard() (model/lm_head.h). Only one
  // forward_model() may run at a time, because it uses the model's scratch memory. Every rank of a group
  // passes the same batch; logits may be null on all but the group's first rank, except on GPUs. With several
  // ranks an error means that a rank failed or timed out, and fails the whole job.
  virtual Status forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) = 0;
  // Moves experts between the ranks by the loads since the last call (model/expert_mover.h); all ranks call
  // it together. kUnsupported if the plan places no experts.
  virtual Result<ExpertMoves> rebalance_experts() {
    return unsupported("the model's experts are not placed by load");
  }
  // Returns the present placements, as for ModelOptions::placements; null if the plan places no experts.
  virtual std::shared_ptr<const ExpertPlacements> placements() const { return nullptr; }
  // Returns the rows of the last pass that ModelOptions::features keeps, the same on all ranks of a group.
  virtual Features features() const { return {}; }
  virtual SharedWeights shared_weights() const { return {}; }
  // A draft model whose vocabulary is a part of the target's: [vocab_size] the target's id of each of its
  // ids. Empty: the ids are the same.
  virtual std::span<const int32_t> token_ids() const { return {}; }
  // A draft model: continues `target`, which has been loaded with the options of the previous one and
  // outlives this model. A model that takes tokens alone ignores it.
  virtual void set_target(const Model& /*target*/) {}
};

// Checks that row t of a draft model's batch continues an existing row of `from`, which has `width` columns.
void check_feature_rows(const Batch& batch, const Features& from, int64_t width);

}  // namespace fp4moe
