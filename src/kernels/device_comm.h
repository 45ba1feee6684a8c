// Kernels with which the ranks of a group, each on a GPU, exchange data through their heaps
// (device/peer_heap.h): each rank stores into its peers' memory and waits for their stores into its own
// memory. No data is returned to the host.
//
// An operation is one launch on every rank of the group; all ranks launch the same operations, with the same
// sizes, in the same order. An operation's number, the epoch, is in device memory, so that a graph can be
// replayed.
#pragma once

#include <cstdint>

#include "kernels/group_plane.h"
#include "kernels/ops.h"

namespace fp4moe {

struct MoeCombineArgs;  // kernels/device_moe.h

constexpr int kMaxGroupRanks = 16;
constexpr int kMaxCommBlocks = 512;  // of one launch

// Why a group failed: the first wait that passed its deadline. A kernel writes it to page-locked memory.
struct CommVerdict {
  uint32_t is_set = 0;
  uint32_t peer = 0;                // rank, within the group, for which the kernel waited
  uint64_t op = 0;                  // CommOp::name
  int32_t layer = -1;               // CommOp::layer
  uint32_t expected = 0, seen = 0;  // epochs; seen is 0 for a sum's words, which have no epoch
  uint32_t block = 0;               // index of the waiting block
  uint64_t time = 0;                // nanoseconds of the GPU's clock
};

// Stored at the start of a rank's region. Initially zeros; peers write only `poison`.
struct CommState {
  uint32_t epoch;        // number of operations so far; an operation's own number gives its parity
  uint32_t poison;       // not 0: the group has failed, and operations do nothing
  uint32_t num_entered;  // blocks of the current operation that have read `epoch`
  uint32_t num_failed;   // waits that have passed their deadline; the first one writes the verdict
  uint32_t num_direct;   // direct rounds (kernels/device_a2a.h) so far; selects the next one's buffer
};

// Byte offsets in a rank's region, the same on all ranks; multiples of 128. If ranks do not share memory
// (CommGroup::plane), the region is only this rank's and stages what it exchanges: words [R][word_bytes] has
// operands of sums by source, without marks, there are no sums, and gather [gather_bytes] has one part after
// another.
struct CommLayout {
  int64_t flags = 0;     // [R][kMaxCommBlocks] u32: epochs, by source rank and block
  int64_t words = 0;     // [2][R][word_bytes]: operands of sums and choices of tokens, by parity and source;
                         // kUnsent: not yet arrived
  int64_t sums = 0;      // [2][R * word_bytes]: f32 sums from other ranks, by parity; kUnsent as in `words`
  int64_t gather = 0;    // [2][gather_bytes]: by parity
  int64_t normed = 0;    // [normed_bytes]: bf16 rows [T, H]; each is stored by the rank that norms it
  int64_t exchange = 0;  // rows and results of a2a rounds (kernels/device_a2a.h)
  int64_t word_bytes = 0, gather_bytes = 0, normed_bytes = 0, exchange_bytes = 0;
  int64_t num_bytes = 0;  // of the whole region
};
// Returns the layout of a region. The byte counts are multiples of 128. The region has no `sums` if num_ranks
// is 2: a sum over two ranks takes one exchange. is_staged: the ranks do not share memory.
constexpr CommLayout comm_layout(int num_ranks, int64_t word_bytes, int64_t gather_bytes,
                                 int64_t exchange_bytes, bool is_staged = false, int64_t normed_bytes = 0) {
  const int64_t buffers = is_staged ? 1 : 2;
  CommLayout layout{.word_bytes = word_bytes,
                    .gather_bytes = gather_bytes,
                    .normed_bytes = normed_bytes,
                    .exchange_bytes = exchange_bytes};
  layout.flags = 128;  // after the CommState
  layout.words = layout.flags + int64_t{num_ranks} * kMaxCommBlocks * int64_t{sizeof(uint32_t)};
  layout.sums = layout.words + buffers * num_ranks * word_bytes;
  layout.gather = layout.sums + (num_ranks > 2 && !is_staged ? 2 * num_ranks * word_bytes : 0);
  layout.normed = layout.gather + buffers * gather_bytes;
  layout.exchange = layout.normed + normed_bytes;
  layout.num_bytes = layout.exchange + exchange_bytes;
  return layout;
}
// The value of a word that has not arrived: a NaN as f32, and two NaNs as bf16. Senders replace it with
// another NaN.
constexpr uint32_t kUnsent = 0xffffffffu;

// A group as a kernel of one rank sees it.
struct CommGroup {
  int rank = 0, size = 1;            // within the group
  uint8_t* regions[kMaxGroupRanks];  // by rank; with a plane, all of them are this rank's region
  CommLayout layout;
  CommVerdict* verdict = nullptr;
  uint64_t deadline_ns = 0;  // longest wait
  int max_blocks = 1;        // blocks that are resident at once; at most kMaxCommBlocks
  // Null: the ranks share memory. Otherwise it moves what they exchange; used by the host only.
  const GroupPlane* plane = nullptr;
};

// Names an operation in verdicts.
struct CommOp {
  const char* name = "";  // a string literal
  int layer = -1;
};

// The kernel that computes the f32 partials of a small sum can send them itself, so that the links carry them
// while it ends. The group's next operation is then the sum, with AllReduceArgs::are_sent.
struct PartialPeers {
  int count = 0;                            // 0: nothing is sent
  const CommState* state = nullptr;         // this rank's
  uint8_t* words[kMaxGroupRanks - 1] = {};  // of each peer: this rank's partials, at even epochs
  int64_t odd_bytes = 0;                    // how far behind them those of odd epochs are
};
inline PartialPeers partial_peers(const CommGroup& group) {
  const CommLayout& layout = group.layout;
  PartialPeers peers{.state = reinterpret_cast<const CommState*>(group.regions[group.rank]),
                     .odd_bytes = group.size * layout.word_bytes};
  for (int r = 0; r < group.size; ++r)
    if (r != group.rank)
      peers.words[peers.count++] = group.regions[r] + layout.words + group.rank * layout.word_bytes;
  return peers;
}
struct PartialsToSend {
  PartialPeers peers;
  bool are_sent = false;  // set by an op that sends them; other ops only store them
};

struct AllReduceArgs {
  const CommGroup& group;
  CommOp op;
  const float* partial = nullptr;  // [n]; 16-byte aligned, as is out
  float* out = nullptr;            // [n]; must not overlap partial
  int64_t n = 0;                   // a multiple of 4
  // Whether ranks round their partials to bf16 and send these: half of the bytes. Sums are f32 in any case.
  bool bf16_partials = false;
  // Each rank sums one part and sends the sums to its peers, instead of summing everything: with more than
  // two ranks this moves fewer bytes, but it takes two exchanges.
  bool two_shot = false;
  bool are_sent = false;  // the partials, by PartialPeers; without bf16_partials, two_shot and a plane
};
// Returns the largest legal AllReduceArgs::n.
constexpr int64_t max_sum_elements(const CommGroup& group, bool bf16_partials, bool two_shot) {
  const int64_t words = group.layout.word_bytes / 4;
  return two_shot ? words * group.size : bf16_partials ? 2 * words : words;
}

constexpr int64_t kMaxNormedCols = 8192;
// A sum of whole rows in one exchange, and the norm of the result.
struct AllReduceNormArgs {
  AllReduceArgs sum;  // n is T * H, with H a multiple of 4, at most kMaxNormedCols; not two_shot
  RmsNormArgs norm;   // norm.x is sum.out
  // If set, the rank's partial sums are those of moe_combine(): bf16 rows, nothing added. sum.partial is
  // not read.
  const MoeCombineArgs* experts = nullptr;
};

// The same for many rows, which the ranks share: rank r adds and norms the rows [first[r], first[r + 1]), and
// stores the normed rows on all ranks.
struct ReduceNormGatherArgs {
  const CommGroup& group;  // whose ranks share memory
  CommOp op;
  // One of them is null: the rank's partial sums of all rows, [T, H], or those of moe_combine() as above.
  const float* partial = nullptr;
  const MoeCombineArgs* experts = nullptr;
  float* out = nullptr;  // [T, H]: the sums are added to the rank's own rows
  // norm.x is out; out_act [T, H] is CommLayout::normed and receives all rows; out_f32 only the rank's own.
  RmsNormArgs norm;
  int64_t first[kMaxGroupRanks + 1] = {};
  int64_t skipped = 0, rows = 0;  // the operation takes the rows [skipped, skipped + rows) of each share
  bool bf16_partials = false;     // AllReduceArgs::bf16_partials
};

// Columns of rows are distributed over the ranks: rank r has the bytes [first[r], first[r + 1]) of each row.
struct GatherArgs {
  const CommGroup& group;
  CommOp op;
  const void* mine = nullptr;  // [any number of rows][first[rank + 1] - first[rank]]
  void* out = nullptr;         // [rows][row_bytes]; one row: `mine` may be its own place in it
  int64_t pitch = 0;           // bytes from one row of out to the next; any if the ranks share memory
  int64_t rows = 0;            // rows * row_bytes <= gather_bytes
  int64_t first[kMaxGroupRanks + 1] = {};  // multiples of 4; first[R] is row_bytes
  // Rank r gets the rows [first_row[r], first_row[r] + rows); all 0 unless the ranks share memory.
  int64_t first_row[kMaxGroupRanks] = {};
};

// Some of the rows [T][row_bytes] that the ranks share: rank r has the rows [first[r], first[r + 1]).
struct GatherSharesArgs {
  const CommGroup& group;  // whose ranks share memory
  CommOp op;
  const void* x = nullptr;              // [T][row_bytes]; only this rank's rows are read
  void* out = nullptr;                  // [num_rows][row_bytes]: the rows `rows` of x
  const int64_t* rows = nullptr;        // [num_rows]
  int64_t num_rows = 0, row_bytes = 0;  // row_bytes: a multiple of 4; num_rows * row_bytes <= gather_bytes
  int64_t first[kMaxGroupRanks + 1] = {};
};

// All pointers are device memory; all work is enqueued on the current stream. With a plane, an operation is
// several launches and an exchange.
struct DeviceCommOps {
  // Marks the words of this rank's region as unsent, and clears its state and flags. All ranks call it before
  // the first operation.
  void (*arm)(const CommGroup& group);
  // Adds to out the f32 sum of all ranks' partial, in rank order: the same bits on every rank and with both
  // algorithms. A sum of -0.0 counts as +0.0. The bits of a NaN are unspecified.
  void (*all_reduce)(const AllReduceArgs& args);
  // all_reduce() followed by rms_norm(), with the same bits, in one launch. The ranks must share memory.
  void (*all_reduce_norm)(const AllReduceNormArgs& args);
  // all_reduce_norm() of shares of the rows, with the same bits.
  void (*reduce_norm_gather)(const ReduceNormGatherArgs& args);
  void (*gather)(const GatherArgs& args);
  void (*gather_shares)(const GatherSharesArgs& args);
  // Returns how many blocks of these kernels can be resident at once on the current GPU.
  int (*max_blocks)();
};
// Returns null in a build without CUDA.
const DeviceCommOps* cuda_comm_ops();

}  // namespace fp4moe
