// DeviceCommunicator: a group of consecutive ranks, each on a GPU, that run the same operations in the same
// order on one stream each. Operations are only enqueued. If a rank does not take part in time, the group
// fails (failure()), and all later operations do nothing. The ranks of one process share memory; those of
// different processes stage what they exchange and send it over a plane (kernels/group_plane.h), with the
// same results.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "device/peer_heap.h"
#include "device/stream.h"
#include "fp4moe/status.h"
#include "kernels/device_comm.h"

namespace fp4moe {

// A group's memory in each rank's heap.
struct DeviceRegion {
  int64_t offset = 0;        // bytes, in the heap; a multiple of 128
  int64_t word_bytes = 0;    // largest operand of one exchange of a sum
  int64_t gather_bytes = 0;  // largest output of one gather; larger outputs are gathered some rows at a time
  int64_t normed_bytes = 0;  // rows of one sum_norm_shares()
  int64_t exchange_bytes = 0;  // rows and results of a2a rounds
  bool is_staged = false;      // for make_staged()

  CommLayout layout(int num_ranks) const;
  int64_t num_bytes(int num_ranks) const;
};

// Returns the bytes of f32 from which a sum in two exchanges is faster than a sum in one, according to a
// model of NVLink.
int64_t two_shot_bytes(int num_ranks);
// Returns DeviceRegion::word_bytes for sums of any size, which are split into operands of up to 24 MiB. In
// two exchanges, each rank has a part of an operand.
int64_t sum_word_bytes(int num_ranks);

// Other places for gathered rows, if the ranks share memory.
struct GatherPlaces {
  std::optional<int64_t> pitch;        // bytes from one row of the output to the next
  std::span<const int64_t> first_row;  // if not empty: rank r gets the input's rows from first_row[r] on
};

// A rank's partial sums of rows, borrowed during a call: f32 [T, H] in device memory, or those of
// moe_combine(), bf16 rows with nothing added. are_sent: see add_all_reduced().
struct RowPartials {
  RowPartials(const float* sums, bool sent = false) : rows(sums), are_sent(sent) {}
  RowPartials(const MoeCombineArgs& combine) : experts(&combine) {}
  const float* rows = nullptr;
  const MoeCombineArgs* experts = nullptr;
  bool are_sent = false;
};

// Large because all operations of a group are here.
class DeviceCommunicator {
 public:
  // Makes the communicator of rank `rank` in the group of the heap's ranks [first_rank, first_rank +
  // num_ranks). All communicators of the group must be made, and their streams synchronized, before the first
  // operation. Every operation must be enqueued on the stream that is current in this call. The heap must
  // outlive the communicator. kUnsupported: too many ranks, or a build without CUDA.
  static Result<std::unique_ptr<DeviceCommunicator>> make(const PeerHeap& heap, int first_rank, int num_ranks,
                                                          int rank, const DeviceRegion& region,
                                                          std::chrono::nanoseconds timeout);

  // The same for a group whose ranks do not share memory. `region` has offset 0 and is staged; its memory is
  // allocated on the current GPU. `first_rank` is only for messages.
  static Result<std::unique_ptr<DeviceCommunicator>> make_staged(std::unique_ptr<GroupPlane> plane,
                                                                 int first_rank, int num_ranks, int rank,
                                                                 const DeviceRegion& region);

  // Whether the ranks share memory, so that kernels can exchange data (exchange_group()).
  bool shares_memory() const { return plane_ == nullptr; }
  int rank() const { return group_.rank; }  // within the group
  int size() const { return group_.size; }

  // Where the kernel that computes the n partials of a sum may send them. Nothing if the sum has to send
  // them itself.
  std::optional<PartialsToSend> partials_to_send(int64_t n) const;
  // out += the sum over ranks, in rank order, of `partial`: bit-identical on every rank. `partial` and `out`
  // are [n] f32 in device memory; n is a multiple of 4. are_sent: PartialsToSend::are_sent; the group's
  // operations before have been enqueued before the kernel that has sent.
  void add_all_reduced(const CommOp& op, const float* partial, float* out, int64_t n,
                       bool are_sent = false) const;
  // add_all_reduced() of rows and the norm of the result in one launch, with the bits of the two operations.
  // norm.x is `out` [T, H]. Only for sizes with fuses_norm().
  void add_all_reduced_norm(const CommOp& op, const RowPartials& partials, float* out,
                            const RmsNormArgs& norm) const;
  bool fuses_norm(int64_t rows, int64_t cols) const;

  // The region's memory for normed rows, with room for normed_bytes(). A model can keep its rows there at all
  // times: peers store into it only in sum_norm_shares().
  void* normed_rows() const { return group_.regions[group_.rank] + group_.layout.normed; }
  int64_t normed_bytes() const { return group_.layout.normed_bytes; }
  // Whether many rows are summed faster by sum_norm_shares(), which then is legal.
  bool shares_norm(int64_t rows, int64_t cols) const;
  // How the ranks share `rows` rows, as even as possible: [size + 1], the first row of each rank, and `rows`.
  // In a rehearsal this rank has all rows.
  std::vector<int64_t> row_shares(int64_t rows) const;
  // add_all_reduced_norm() with the same bits, except that of `out` and norm.out_f32 only this rank's rows
  // are written: [first[rank], first[rank + 1]). norm.out_act [T, H] is normed_rows(), and gets all rows. The
  // partials must not have been sent.
  void sum_norm_shares(const CommOp& op, const RowPartials& partials, float* out, const RmsNormArgs& norm,
                       std::span<const int64_t> first) const;

  // Gathers `rows` rows. Rank r has the columns [first[r], first[r + 1]), given in bytes that are multiples
  // of 4. `mine` is [rows, first[rank + 1] - first[rank]], `out` [rows, first[size]], in device memory.
  void gather_columns(const CommOp& op, const void* mine, int64_t rows, std::span<const int64_t> first,
                      void* out, const GatherPlaces& places = {}) const;

  // Gathers rows of row_bytes bytes, a multiple of 4. Rank r has the rows [first[r], first[r + 1]). `mine` is
  // [first[rank + 1] - first[rank], row_bytes], `out` [first[size], row_bytes], in device memory; `mine` may
  // point to this rank's rows in `out`.
  void gather_rows(const CommOp& op, const void* mine, int64_t row_bytes, std::span<const int64_t> first,
                   void* out) const;

  // Gathers the rows of x [T, row_bytes] that rows.rows names. Rank r has the rows [first[r], first[r + 1])
  // of x. The ranks share memory.
  void gather_shares(const CommOp& op, const GatherRowsArgs& rows, std::span<const int64_t> first) const;

  // From now on, ranks round the partials of sums to bf16 and send these: half of the bytes. All ranks of the
  // group call it before the first operation. n must then be a multiple of 8.
  void send_bf16_partials() { bf16_partials_ = true; }
  // Adds `of_model`, a string literal such as "the draft model", to the operations in failure().
  // Communicators of one region and stream are one group to its operations, whichever of them enqueues one;
  // only the verdict of the one whose operation failed is set.
  void name_model(const char* of_model) { of_model_ = of_model; }

  // Returns the group for an operation of kernels/device_a2a.h or device_sampler.h, which the caller enqueues
  // on the current stream.
  CommGroup exchange_group() const;

  // Starts or ends a rehearsal, in which operations use only this rank's operands, as in a group of one. A
  // step's kernels and libraries make their first-use allocations in it. Such an allocation waits for the
  // GPU, and would never return while another rank's kernel waits on the same GPU. The end of the rehearsal
  // resets the group, as make() does; all ranks must have rehearsed and synchronized before the next
  // operation.
  void rehearse(bool on);

  // When failure() began, in nanoseconds of the GPU's clock; 0 without shared memory. Precondition: it is an
  // error. A rank whose wait has timed out in one group goes on to wait in its others.
  uint64_t failed_at() const { return shares_memory() ? verdict_.as<CommVerdict>()->time : 0; }
  // Without shared memory, returns GroupPlane::failure(). Otherwise returns kDeadline, with the peer,
  // operation and layer, if one of this rank's waits passed its deadline. If only a peer's wait did, the
  // group has failed but this rank returns OK, so check all ranks. May be called at any time; the result is
  // final once the stream is synchronized.
  Status failure() const;

 private:
  DeviceCommunicator() = default;
  static Result<std::unique_ptr<DeviceCommunicator>> make_unarmed(int first_rank, int num_ranks, int rank,
                                                                  const DeviceRegion& region);
  void check_stream() const;
  CommGroup view() const;  // the group, or a group of one during a rehearsal
  bool takes_two_shots(int64_t n) const;
  std::span<const int64_t> visible_shares(std::span<const int64_t> first) const;

  const DeviceCommOps* ops_ = nullptr;
  int first_rank_ = 0;
  CommGroup group_;
  bool rehearses_ = false, bf16_partials_ = false;
  const char* of_model_ = "";
  StreamHandle stream_ = nullptr;
  Buffer verdict_;                     // pinned
  std::unique_ptr<GroupPlane> plane_;  // null: the ranks share memory
  Buffer memory_;                      // device: the region, unless it is in a shared heap
};

}  // namespace fp4moe
