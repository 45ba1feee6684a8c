// Reads dense weights out of a checkpoint into the layout of a DenseOps table, and counts progress.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "fp4moe/config.h"
#include "io/checkpoint.h"
#include "kernels/ops.h"

namespace fp4moe {

// A dense layer: weight [N, K] bf16 in the table's layout, bias [N] f32 or empty.
struct LinearWeights {
  Buffer weight;
  std::vector<float> bias;
  int64_t n = 0, k = 0;
};

class WeightLoader {
 public:
  WeightLoader(const Checkpoint& checkpoint, LinearLayout layout, ThreadPool& pool,
               const ProgressSink& progress)
      : checkpoint_(checkpoint), layout_(layout), pool_(pool), progress_(progress) {}

  // One matrix from the rows of `names`' weights, one below the other: each "<name>.weight" is
  // [rows[i], k] bf16 and, if has_bias, "<name>.bias" [rows[i]] bf16.
  Result<LinearWeights> linear(const std::vector<std::string>& names, const std::vector<int64_t>& rows,
                               int64_t k, bool has_bias);
  // A bf16 vector [n] as f32.
  Result<std::vector<float>> vector(const std::string& name, int64_t n);
  // A bf16 matrix [rows, cols] as it is.
  Result<Buffer> matrix(const std::string& name, int64_t rows, int64_t cols);
  // Reports `bytes` more of the checkpoint as loaded.
  void count(int64_t bytes);

 private:
  const Checkpoint& checkpoint_;
  LinearLayout layout_;
  ThreadPool& pool_;
  const ProgressSink& progress_;
  int64_t done_bytes_ = 0;
};

}  // namespace fp4moe
