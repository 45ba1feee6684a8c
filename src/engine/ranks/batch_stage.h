// BatchStage: copies a step's rows to the GPU in the layout that kernels read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "fp4moe/status.h"
#include "kernels/device_copy.h"
#include "kernels/device_drafts.h"
#include "model/model.h"

namespace fp4moe {

// Upper limits for one step.
struct StageLimits {
  int64_t max_rows = 0, max_sequences = 0, max_logit_rows = 0;
  int64_t rows_per_request = 1;   // most rows of a decoding sequence: its last token and drafts
  int64_t max_pages = 0;          // per sequence; also the number of columns in every step's page table
  bool has_window_pages = false;  // window layers have a second page table
  bool has_feature_rows = false;  // for a draft model (Batch::feature_rows)
  bool has_slots = false;         // sequences have states (SequenceRows::slot), and replay rows for drafts
  bool accepts_drafts = false;    // rows may move (Batch::moves), by accept_drafts()
};

class BatchStage {
 public:
  // put() writes to `host` memory; the batches that it returns point into `device` memory.
  static Result<BatchStage> make(const StageLimits& limits, MemoryResource& host, MemoryResource& device);

  // Returns the batch padded to num_rows >= T rows. In a decode step (decodes()) every row becomes a sequence
  // of one row with a copy of its sequence's page table, so that kernels compute it as in a step without
  // drafts; the sequences and logit rows are padded to num_rows too. Layers with states take the batch's own
  // sequences, padded to num_rows or to the most requests. Enqueues the copies on the current
  // stream. Host memory alternates between two buffers, so the copies for the step before last must have
  // completed. Device addresses depend only on sizes. If the batch has moves, its rows move on the device.
  DeviceBatch put(const Batch& batch, int64_t num_rows);
  // Does the same as put() but without the copies: the data stays in host memory. For tests.
  DeviceBatch write(const Batch& batch, int64_t num_rows);
  // Counts the right drafts of the last batch, which decodes, once its rows have been sampled (`sampled`
  // begins with them; kernels/device_drafts.h). Later batches move by these numbers.
  void accept_drafts(SampledRow* sampled, SampledRow* copy) const;
  // Before its rows are sampled: sets the random numbers of those that have moved. Device memory.
  void move_randoms(SampleRowParams* params) const;
  // The last batch as accept_drafts() reads it. For tests.
  struct AcceptedRows {
    const int32_t *token_ids = nullptr, *moves = nullptr, *num_drafts = nullptr;  // device: AcceptDraftsArgs
    int64_t num_rows = 0;                                                         // without padding
    bool has_moves = false;
  };
  const AcceptedRows& accepted_rows() const { return accepted_; }
  const StageLimits& limits() const { return limits_; }
  // Returns whether all rows have logits and no sequence has more than rows_per_request rows.
  bool decodes(const Batch& batch) const;

 private:
  template <class T>
  T* take(int64_t count, const T** on_device);
  void write_tables(const SequenceRows& rows, int64_t sequence);
  void write_states(const Batch& batch, DeviceBatch& out);
  void write_feature_rows(const Batch& batch, DeviceBatch& out);
  void write_moves(const Batch& batch, int64_t num_rows);
  void move_rows(const DeviceBatch& batch) const;
  HostRows table_copy(int64_t begin, bool is_used);

  StageLimits limits_;
  Buffer& host() { return hosts_[side_]; }

  Buffer hosts_[2], device_;  // all with the same layout: the packed arrays, then the page tables
  int side_ = 0;              // index of the buffer that the last step was written to
  int64_t used_ = 0;          // bytes of the packed arrays
  int64_t page_table_begin_ = 0, window_table_begin_ = 0;
  AcceptedRows accepted_;
  Buffer distances_;        // device: [2, max_logit_rows] AcceptDraftsArgs::distances
  int64_t used_pages_ = 0;  // page-table columns to copy
  int64_t used_page_rows_ = 0;
};

// Returns the sizes that decode steps of up to max_requests requests are padded to, ascending and at most
// max_requests * rows_per_request: `given`, and these sizes times rows_per_request, if not empty; otherwise
// 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, then every multiple of 32 up to max_requests and steps of an eighth
// above, and both max_requests and the limit itself.
std::vector<int64_t> decode_buckets(int64_t max_requests, std::span<const int64_t> given,
                                    int64_t rows_per_request = 1);
// Returns the first bucket >= num_rows, or num_rows if there is none.
int64_t bucket_for(std::span<const int64_t> buckets, int64_t num_rows);

}  // namespace fp4moe
