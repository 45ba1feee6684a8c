// BatchStage: copies a step's rows to the GPU in the layout that kernels read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "fp4moe/status.h"
#include "kernels/device_copy.h"
#include "model/model.h"

namespace fp4moe {

// Upper limits for one step.
struct StageLimits {
  int64_t max_rows = 0, max_sequences = 0, max_logit_rows = 0;
  int64_t max_pages = 0;          // per sequence; also the number of columns in every step's page table
  bool has_window_pages = false;  // window layers have a second page table
};

class BatchStage {
 public:
  // put() writes to `host` memory; the batches that it returns point into `device` memory.
  static Result<BatchStage> make(const StageLimits& limits, MemoryResource& host, MemoryResource& device);

  // Returns the batch padded to num_rows >= T rows. If every sequence has one row and one logit row, the
  // sequences and logit rows are padded to num_rows too. Enqueues the copies on the current stream. Host
  // memory alternates between two buffers, so the copies for the step before last must have completed. Device
  // addresses depend only on sizes.
  DeviceBatch put(const Batch& batch, int64_t num_rows);
  // Does the same as put() but without the copies: the data stays in host memory. For tests.
  DeviceBatch write(const Batch& batch, int64_t num_rows);
  const StageLimits& limits() const { return limits_; }

 private:
  template <class T>
  T* take(int64_t count, const T** on_device);
  void write_tables(const SequenceRows& rows, int64_t sequence);
  HostRows table_copy(int64_t begin, bool is_used);

  StageLimits limits_;
  Buffer& host() { return hosts_[side_]; }

  Buffer hosts_[2], device_;  // all with the same layout: the packed arrays, then the page tables
  int side_ = 0;              // index of the buffer that the last step was written to
  int64_t used_ = 0;          // bytes of the packed arrays
  int64_t page_table_begin_ = 0, window_table_begin_ = 0;
  int64_t used_pages_ = 0;  // page-table columns to copy
  int64_t used_page_rows_ = 0;
};

// Returns whether every sequence has one row and one logit row.
bool is_decode(const Batch& batch);

// Returns the sizes that decode steps are padded to, ascending and at most max_rows: `given` if not empty,
// otherwise 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, then every multiple of 32, and max_rows itself.
std::vector<int64_t> decode_buckets(int64_t max_rows, std::span<const int64_t> given);
// Returns the first bucket >= num_rows, or num_rows if there is none.
int64_t bucket_for(std::span<const int64_t> buckets, int64_t num_rows);

}  // namespace fp4moe
