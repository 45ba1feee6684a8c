// Loads this rank's part of a checkpoint's weights outside the experts, and counts progress. Values must be
// finite: kDataLoss names the tensor and the position of a NaN or infinity.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "fp4moe/sinks.h"
#include "io/checkpoint/checkpoint.h"
#include "io/checkpoint/kv_scales.h"
#include "io/config/model_config.h"
#include "kernels/ops.h"
#include "model/linear_layer.h"
#include "model/model.h"

namespace fp4moe {

// Shape of a linear layer in the checkpoint.
struct LinearShape {
  int64_t n = 0, k = 0;
  bool has_bias = false;
};

// The ops for a model with these options. Batches, logits and KV pages are in the ops' memory.
const DenseOps& dense_ops_for(const ModelOptions& options);

// Large because each kind of tensor has a method.
class WeightLoader {
 public:
  // All arguments must outlive the loader.
  WeightLoader(const Checkpoint& checkpoint, const ModelConfig& config, const ModelOptions& options,
               ThreadPool& pool, const ProgressSink& progress);

  const Checkpoint& checkpoint() const { return checkpoint_; }
  const ModelConfig& config() const { return config_; }
  const RankContext& rank() const { return options_.rank; }
  const RankLayout& layout() const { return options_.rank.layout; }
  const MoePlan& moe_plan() const { return moe_plan_; }  // this rank's
  // The placement of a layer's experts; null if the plan places none.
  const ExpertPlacement* placement(int64_t layer) const {
    return options_.placements == nullptr ? nullptr : &(*options_.placements)[static_cast<size_t>(layer)];
  }
  // Whether the group's ranks must give the same bits as a single rank. If so, they gather their layers'
  // inputs and never add partial sums.
  bool is_deterministic() const { return moe_plan_.a2a_settings().deterministic; }
  const DenseOps& ops() const { return ops_; }
  ThreadPool& pool() const { return pool_; }

  // A view of "<name>.weight" [n, k] and, if has_bias, "<name>.bias" [n].
  Result<LinearWeightsView> view(const std::string& name, const LinearShape& shape) const;
  // Makes a layer of these parts, and releases the mapped pages of bf16 and FP8 sources to the system.
  Result<LinearLayer> linear(const std::vector<LinearPart>& parts);
  // Makes a layer of one whole matrix.
  Result<LinearLayer> linear(const std::string& name, const LinearShape& shape);
  // Makes a layer of the columns `cols` of a matrix [n, k] that is sharded by columns. The attention group
  // adds the ranks' results, so only its first rank has the bias.
  Result<LinearLayer> column_shard(const std::string& name, const LinearShape& shape, Shard cols);
  // Makes a layer of the rows `rows` of a matrix [n, k] and of its bias; it has no outputs if `rows` is
  // empty.
  Result<LinearLayer> row_shard(const std::string& name, const LinearShape& shape, Shard rows);
  // A bf16 or f32 tensor as f32.
  Result<std::vector<float>> values(const std::string& name, const std::vector<int64_t>& shape);
  // A bf16 or f32 vector [n] as f32.
  Result<std::vector<float>> vector(const std::string& name, int64_t n) { return values(name, {n}); }
  // A bf16 or f32 vector [n] as f32, in the ops' memory.
  Result<Buffer> floats(const std::string& name, int64_t n);
  // The factors [n] of an RMS norm in the ops' memory: the weights or, with centred norms, 1 + weights.
  Result<Buffer> norm(const std::string& name, int64_t n);
  // The scales of the KV pages of the attention with this prefix; 1 unless pages are kF8E4M3.
  Result<KvScales> kv_scales(const std::string& prefix) const;
  // A copy of `values` in the ops' memory.
  Result<Buffer> put(const std::vector<float>& values) const;
  // Moves bytes to the ops' memory; returns `host` itself on a CPU.
  Result<Buffer> put(Buffer host) const;
  // A bf16 matrix [rows, cols], row-major, in the ops' memory.
  Result<Buffer> matrix(const std::string& name, int64_t rows, int64_t cols);
  // kDataLoss if a bf16 or FP8 value of the part is NaN or infinite. Matrices that a weight store has already
  // packed were checked when they were packed, and are not checked again.
  Status check_part(const LinearPart& part) const;
  // Runs check_part() on the parts of an MLP's three matrices for this shard of I.
  Status check_mlp(const MlpWeightsView& mlp, Shard intermediate) const;
  // Adds `bytes` to the loaded bytes and reports the progress, which ends at the checkpoint's bytes: padding
  // and copies can make a rank's weights larger.
  void count(int64_t bytes);

 private:
  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  const ModelOptions& options_;
  const MoePlan moe_plan_;
  const DenseOps& ops_;
  ThreadPool& pool_;
  const ProgressSink& progress_;
  int64_t done_bytes_ = 0;
};

}  // namespace fp4moe
