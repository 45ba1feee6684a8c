// DenseWeight: a rank's part of one or several bf16 or FP8 matrices of a checkpoint, stacked by rows, in the
// memory and layout of a table of ops.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"
#include "kernels/ops.h"
#include "kernels/weight_bytes.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

// A rank's rows and columns of a checkpoint's [N, K] matrix.
struct LinearPart {
  LinearWeightsView weights;
  std::vector<int64_t> rows;  // rows of N (and elements of the bias) in output order; empty: all rows
  Shard cols;                 // columns of K; count 0: all columns

  bool is_whole() const { return rows.empty() && cols.count == 0; }
  int64_t num_rows() const { return rows.empty() ? weights.n : static_cast<int64_t>(rows.size()); }
  int64_t num_cols() const { return cols.count > 0 ? cols.count : weights.k; }
  int64_t source_row(int64_t i) const { return rows.empty() ? i : rows[static_cast<size_t>(i)]; }
};

// num_bytes bytes, `offset` bytes after the start of each of a part's rows, which are `stride` bytes apart.
struct RowBytes {
  const uint8_t* src;
  int64_t stride, offset, num_bytes;
};
// Copies them to dst [rows, num_bytes].
void copy_rows(const LinearPart& part, const RowBytes& row, uint8_t* dst);

// The numbers first .. first + count - 1.
std::vector<int64_t> row_range(int64_t first, int64_t count);

// Whether one DenseWeight can hold the parts: all are bf16, or all are FP8.
bool can_stack(std::span<const LinearPart> parts);

class DenseWeight {
 public:
  DenseWeight() = default;
  // Precondition: can_stack(parts), and the parts have the same number of columns. kUnsupported if `cols`
  // cuts FP8 scale blocks elsewhere than at a multiple of kFp8ColumnStep columns of the block, or if the ops
  // have no FP8. The sources may be released afterwards; `ops` must outlive the weight.
  static Result<DenseWeight> make(const DenseOps& ops, std::span<const LinearPart> parts, ThreadPool& pool);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  // Null if the weight is FP8 or Q8.
  const bf16* bf16_values() const { return format_ == LinearFormat::kBf16 ? bf16_.as<bf16>() : nullptr; }
  int64_t num_bytes() const { return bf16_.num_bytes() + fp8_.storage.num_bytes(); }
  // Arguments for out [T, N] (+)= x W^T + bias.
  LinearArgs args(const ActRows& x, const float* bias, float* out, bool accumulate) const;
  // The values or codes, without scales.
  WeightBytes bytes() const;

 private:
  LinearFormat format_ = LinearFormat::kBf16;
  Buffer bf16_;  // bf16 or Q8; empty with kFp8
  Fp8Weight fp8_;
  int64_t n_ = 0, k_ = 0;
};

}  // namespace fp4moe
