// Reads what is not an expert out of a checkpoint, this rank's part of it, and counts progress. What it reads
// is finite: kDataLoss names the tensor and the position of a value that is not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "fp4moe/sinks.h"
#include "io/checkpoint.h"
#include "io/model_config.h"
#include "kernels/ops.h"
#include "model/linear_layer.h"
#include "model/model.h"

namespace fp4moe {

// Of a linear layer in the checkpoint.
struct LinearShape {
  int64_t n = 0, k = 0;
  bool has_bias = false;
};

// What runs a model with these options; batches, logits and KV pages lie in its memory.
const DenseOps& dense_ops_for(const ModelOptions& options);

class WeightLoader {
 public:
  // All arguments are borrowed.
  WeightLoader(const Checkpoint& checkpoint, const ModelConfig& config, const ModelOptions& options,
               ThreadPool& pool, const ProgressSink& progress);

  const Checkpoint& checkpoint() const { return checkpoint_; }
  const ModelConfig& config() const { return config_; }
  const RankContext& rank() const { return options_.rank; }
  const RankLayout& layout() const { return options_.rank.layout; }
  const MoePlan& moe_plan() const { return moe_plan_; }  // this rank's
  // Whether the group's ranks must give one rank's bits: they gather what their layers read, and never add up
  // partial sums.
  bool is_deterministic() const { return moe_plan_.a2a_settings().deterministic; }
  const DenseOps& ops() const { return ops_; }
  ThreadPool& pool() const { return pool_; }

  // "<name>.weight" [n, k] and, if has_bias, "<name>.bias" [n].
  Result<LinearWeightsView> view(const std::string& name, const LinearShape& shape) const;
  // A layer of these parts; their sources' memory is given back to the system.
  Result<LinearLayer> linear(const std::vector<LinearPart>& parts);
  // The whole of one matrix.
  Result<LinearLayer> linear(const std::string& name, const LinearShape& shape);
  // A matrix [n, k] whose columns the attention group shares out and whose results it adds up: only the
  // group's first rank has the bias.
  Result<LinearLayer> column_shard(const std::string& name, const LinearShape& shape, Shard cols);
  // The rows `rows` of a matrix [n, k] and of its bias; a layer without outputs if there are none.
  Result<LinearLayer> row_shard(const std::string& name, const LinearShape& shape, Shard rows);
  // A bf16 or f32 vector [n] as f32.
  Result<std::vector<float>> vector(const std::string& name, int64_t n);
  // The same, in the ops' memory.
  Result<Buffer> floats(const std::string& name, int64_t n);
  // A copy in the ops' memory.
  Result<Buffer> put(const std::vector<float>& values) const;
  // The same bytes there; nothing to do on a CPU.
  Result<Buffer> put(Buffer host) const;
  // A bf16 matrix [rows, cols] as it is, in the ops' memory.
  Result<Buffer> matrix(const std::string& name, int64_t rows, int64_t cols);
  // kDataLoss if a bf16 value that the part has is NaN or infinite. Matrices that are not packed now, because
  // a weight store has them, were checked when they were packed.
  Status check_part(const LinearPart& part) const;
  // The same of this shard of an MLP's I.
  Status check_mlp(const MlpWeightsView& mlp, Shard intermediate) const;
  // Reports `bytes` more of the checkpoint as loaded.
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

// `count` consecutive numbers from `first` on.
std::vector<int64_t> row_range(int64_t first, int64_t count);

}  // namespace fp4moe
