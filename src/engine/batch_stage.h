// BatchStage: a step's rows on their way to the GPU, as kernels read them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "fp4moe/status.h"
#include "model/model.h"

namespace fp4moe {

// The most that one step has.
struct StageLimits {
  int64_t max_rows = 0, max_sequences = 0, max_logit_rows = 0;
  int64_t max_pages = 0;  // of one sequence: the columns of every step's page table
};

class BatchStage {
 public:
  // `host` memory is written by put(), `device` memory is what the batches point to.
  static Result<BatchStage> make(const StageLimits& limits, MemoryResource& host, MemoryResource& device);

  // The batch, padded to num_rows rows: with rows of its own (>= T), or, if every sequence has one row, with
  // as many sequences and logit rows. What it points to comes with the copies that are asked of the current
  // stream: those of the step before the last must have been done. Sizes alone decide the addresses.
  DeviceBatch put(const Batch& batch, int64_t num_rows);
  // The same without the copies: what put() would copy lies in host memory. For tests.
  DeviceBatch write(const Batch& batch, int64_t num_rows);

 private:
  template <class T>
  T* take(int64_t count, const T** on_device);

  StageLimits limits_;
  Buffer& host() { return hosts_[side_]; }

  Buffer hosts_[2], device_;  // one layout: what is packed, then the page table
  int side_ = 0;              // that the last step was written to
  int64_t used_ = 0;          // of what is packed
  int64_t page_table_begin_ = 0;
  int64_t used_pages_ = 0;  // columns
  int64_t used_page_rows_ = 0;
};

// Whether every sequence has one row and wants its logits.
bool is_decode(const Batch& batch);

// Sizes that decode steps are padded to, ascending, at most max_rows: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64,
// then steps of 32, and max_rows itself. `given`, if not empty, instead of these.
std::vector<int64_t> decode_buckets(int64_t max_rows, std::span<const int64_t> given);
// The first bucket that holds num_rows; num_rows itself if none does.
int64_t bucket_for(std::span<const int64_t> buckets, int64_t num_rows);

}  // namespace fp4moe
