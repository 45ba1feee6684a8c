// BatchStage: copies a step's rows to the GPU in the layout that kernels read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "fp4moe/status.h"
#include "model/model.h"

namespace fp4moe {

// Upper limits of one step.
struct StageLimits {
  int64_t max_rows = 0, max_sequences = 0, max_logit_rows = 0;
  int64_t max_pages = 0;  // of one sequence: the number of columns of every step's page table
};

class BatchStage {
 public:
  // put() writes `host` memory; the batches point into `device` memory.
  static Result<BatchStage> make(const StageLimits& limits, MemoryResource& host, MemoryResource& device);

  // Returns the batch padded to num_rows rows. If every sequence has one row and one logit row, sequences and
  // logit rows are padded to num_rows too; otherwise num_rows >= T and only rows are padded. The copies are
  // enqueued on the current stream. Host memory alternates between two buffers: the copies of the step before
  // last must have completed. Device addresses depend on sizes only.
  DeviceBatch put(const Batch& batch, int64_t num_rows);
  // The same without the copies: the data stays in host memory. For tests.
  DeviceBatch write(const Batch& batch, int64_t num_rows);
  const StageLimits& limits() const { return limits_; }

 private:
  template <class T>
  T* take(int64_t count, const T** on_device);

  StageLimits limits_;
  Buffer& host() { return hosts_[side_]; }

  Buffer hosts_[2], device_;  // the same layout: the packed arrays, then the page table
  int side_ = 0;              // the buffer that the last step was written to
  int64_t used_ = 0;          // bytes of the packed arrays
  int64_t page_table_begin_ = 0;
  int64_t used_pages_ = 0;  // columns
  int64_t used_page_rows_ = 0;
};

// Whether every sequence has one row and one logit row.
bool is_decode(const Batch& batch);

// Sizes that decode steps are padded to, ascending, at most max_rows: `given` if not empty, otherwise 1, 2,
// 4, 8, 12, 16, 24, 32, 48, 64, then steps of 32, and max_rows itself.
std::vector<int64_t> decode_buckets(int64_t max_rows, std::span<const int64_t> given);
// The first bucket >= num_rows, or num_rows if there is none.
int64_t bucket_for(std::span<const int64_t> buckets, int64_t num_rows);

}  // namespace fp4moe
