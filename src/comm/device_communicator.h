// DeviceCommunicator: a group of consecutive ranks of one process, each on a GPU, that run the same
// operations in the same order on one stream each. An operation is enqueued; a rank that does not take part
// in time fails the group (failure()), and all later operations do nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "base/buffer.h"
#include "device/peer_heap.h"
#include "device/stream.h"
#include "fp4moe/status.h"
#include "kernels/device_comm.h"

namespace fp4moe {

// Memory of one group in each rank's heap.
struct DeviceRegion {
  int64_t offset = 0;        // bytes, in the heap; a multiple of 128
  int64_t word_bytes = 0;    // largest operand of one exchange of a sum
  int64_t gather_bytes = 0;  // largest output of one gather; larger outputs are gathered some rows at a time
  int64_t exchange_bytes = 0;  // a2a rounds

  CommLayout layout(int num_ranks) const;
  int64_t num_bytes(int num_ranks) const;
};

// Where a two-exchange sum becomes faster than one exchange, in bytes of f32, by a model of NVLink.
int64_t two_shot_bytes(int num_ranks);
// DeviceRegion::word_bytes for sums of any size: what one exchange takes below two_shot_bytes(), or 5 MB for
// two ranks, whose sums are cut there.
int64_t sum_word_bytes(int num_ranks);

class DeviceCommunicator {
 public:
  // Rank `rank` of the ranks [first_rank, first_rank + num_ranks) of the heap. All of the group must be made,
  // and their streams synchronized, before the first operation. The stream is this rank's current stream, on
  // which every operation must be enqueued. The heap must outlive the communicator. kUnsupported: too many
  // ranks.
  static Result<std::unique_ptr<DeviceCommunicator>> make(const PeerHeap& heap, int first_rank, int num_ranks,
                                                          int rank, const DeviceRegion& region,
                                                          std::chrono::nanoseconds timeout);

  int rank() const { return group_.rank; }  // within the group
  int size() const { return group_.size; }

  // out += the sum over ranks, in rank order, of `partial`: bit-identical on every rank. Both [n] f32 in
  // device memory, n a multiple of 4.
  void add_all_reduced(const CommOp& op, const float* partial, float* out, int64_t n) const;
  // Rank r has the columns [first[r], first[r + 1]) of `rows` rows, in bytes that are multiples of 4. `mine`
  // is [rows, first[rank + 1] - first[rank]], `out` [rows, first[size]], in device memory.
  void gather_columns(const CommOp& op, const void* mine, int64_t rows, std::span<const int64_t> first,
                      void* out) const;

  // Rank r has the rows [first[r], first[r + 1]), of row_bytes bytes that are a multiple of 4. `mine` is
  // [first[rank + 1] - first[rank], row_bytes], `out` [first[size], row_bytes], in device memory; `mine` may
  // be its own place in `out`.
  void gather_rows(const CommOp& op, const void* mine, int64_t row_bytes, std::span<const int64_t> first,
                   void* out) const;

  // The group for an a2a operation (kernels/device_a2a.h), to be enqueued on the current stream.
  CommGroup exchange_group() const;

  // While `on`, operations act on this rank's operands alone, as in a group of one: a rehearsal by which a
  // step's kernels and libraries make their first-use allocations. These wait for the GPU, and would never
  // return while another rank's kernel waits on the same GPU. Turning it off starts the group anew, as make()
  // does; all ranks must have rehearsed and synchronized before the next operation.
  void rehearse(bool on);

  // OK, or why the group has failed: this rank waited in vain (kDeadline, with the peer, operation and
  // layer), or a peer did. May be called at any time; complete once the stream is synchronized.
  Status failure() const;

 private:
  DeviceCommunicator() = default;
  void check_stream() const;
  CommGroup view() const;  // for an operation

  const DeviceCommOps* ops_ = nullptr;
  int first_rank_ = 0;
  CommGroup group_;
  bool rehearses_ = false;
  StreamHandle stream_ = nullptr;
  Buffer verdict_;  // pinned
};

}  // namespace fp4moe
