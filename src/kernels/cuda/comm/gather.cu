// Gathers rows whose columns are distributed over the GPUs of a group, or some of many rows that its GPUs
// share.
//
// Computes:  out [rows, W]: rank r has the bytes [first_r, first_{r+1}) of each row; all ranks get whole
//            rows, the same or each its own. Or out [n, W]: the rows that an index names, each from the rank
//            that has it.
// Shapes:    any widths that are multiples of 4 bytes.
// Bytes:     each rank sends its part to R - 1 peers, and copies what arrives from its heap to out.
// Flops:     none.
// Bound:     the links for many bytes; for few bytes, the latency of a flag, about 1.3 us one way on NVLink.
// Numerics:  copies bits.
#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/staged_transfers.h"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256;

// Returns the offset of an operation's gather memory in each rank's region.
__device__ __forceinline__ int64_t staging_of(const Operation& o) {
  return o.group.layout.gather + int64_t{o.parity()} * o.group.layout.gather_bytes;
}

struct ColumnsArgs {
  CommGroup group;
  CommOp op;
  const uint8_t* mine;
  uint8_t* out;
  int64_t rows;
  int64_t pitch, first[kMaxGroupRanks + 1];  // in words of the kernel's type
  int64_t first_row[kMaxGroupRanks];
};

template <class Word>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ ColumnsArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  const int me = a.group.rank, size = a.group.size;
  const int64_t width = a.first[size], thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{kThreads};
  const int64_t staging = staging_of(o);
  const auto* const mine = reinterpret_cast<const Word*>(a.mine);
  auto* const out = reinterpret_cast<Word*>(a.out);
  const int64_t cols = a.first[me + 1] - a.first[me];
  for (int64_t i = thread; i < a.rows * cols; i += threads) {
    const int64_t row = i / cols, col = a.first[me] + i % cols;
    Word v{};
    for (int r = 0; r < size; ++r) {
      if (r == 0 || a.first_row[r] != a.first_row[r - 1]) v = __ldcg(mine + a.first_row[r] * cols + i);
      if (r == me)
        out[row * a.pitch + col] = v;
      else
        reinterpret_cast<Word*>(a.group.regions[r] + staging)[row * width + col] = v;
    }
  }
  __syncthreads();
  raise_flags(o, blockIdx.x);
  wait_for_flags(o, static_cast<int>(gridDim.x));
  const auto* const arrived = reinterpret_cast<const Word*>(a.group.regions[me] + staging);
  const int64_t others = width - cols;
  for (int64_t i = thread; i < a.rows * others; i += threads) {
    const int64_t row = i / others, other = i % others, col = other < a.first[me] ? other : other + cols;
    out[row * a.pitch + col] = __ldcg(arrived + row * width + col);
  }
}

struct SharesArgs {
  CommGroup group;
  CommOp op;
  const uint32_t* x;
  uint32_t* out;
  const int64_t* rows;
  int64_t num_rows, words;
  int64_t first[kMaxGroupRanks + 1];
};

// A block takes rows in turn; the same block of the rank that has a row sends it.
__global__ void __launch_bounds__(kThreads) gather_shares_kernel(const __grid_constant__ SharesArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  const int me = a.group.rank, size = a.group.size;
  const int64_t words = a.words;
  const int64_t staging = staging_of(o);
  const auto staged = [&](int rank) { return reinterpret_cast<uint32_t*>(a.group.regions[rank] + staging); };
  // Calls f(i, row) for this block's rows i of out.
  const auto for_rows = [&](bool of_this_rank, const auto& f) {
    for (int64_t i = blockIdx.x; i < a.num_rows; i += gridDim.x)
      if (const int64_t row = __ldcg(a.rows + i);
          (row >= a.first[me] && row < a.first[me + 1]) == of_this_rank)
        f(i, row);
  };
  for_rows(true, [&](int64_t i, int64_t row) {
    for (int64_t c = threadIdx.x; c < words; c += kThreads) {
      const uint32_t v = __ldcg(a.x + row * words + c);
      a.out[i * words + c] = v;
      for (int r = 0; r < size; ++r)
        if (r != me) staged(r)[i * words + c] = v;
    }
  });
  __syncthreads();
  raise_flags(o, blockIdx.x);
  wait_for_flag(o, blockIdx.x);
  for_rows(false, [&](int64_t i, int64_t) {
    for (int64_t c = threadIdx.x; c < words; c += kThreads)
      a.out[i * words + c] = __ldcg(staged(me) + i * words + c);
  });
}

struct PlaceArgs {
  const uint8_t* mine;
  const uint8_t* staged;
  uint8_t* out;
  int64_t rows;
  int rank, size;
  int64_t first[kMaxGroupRanks + 1];  // in words of the kernel's type
};

// Without shared memory: places this rank's columns and those that have arrived, one rank's after another's,
// in `out`. `mine` may be its own place in out.
template <class Word>
__global__ void __launch_bounds__(kThreads) place_kernel(const __grid_constant__ PlaceArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t width = a.first[a.size];
  const auto* const mine = reinterpret_cast<const Word*>(a.mine);
  const auto* const staged = reinterpret_cast<const Word*>(a.staged);
  auto* const out = reinterpret_cast<Word*>(a.out);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < a.rows * width;
       i += gridDim.x * int64_t{kThreads}) {
    const int64_t row = i / width, col = i % width;
    int r = 0;
    while (a.first[r + 1] <= col) ++r;
    const int64_t at = row * (a.first[r + 1] - a.first[r]) + col - a.first[r];
    out[i] = r == a.rank ? __ldcg(mine + at) : __ldcg(staged + a.rows * a.first[r] + at);
  }
}

// `word`: 16 or 4; every part of a row is a multiple of it.
void staged_gather(const GatherArgs& a, int64_t word) {
  const CommGroup& g = a.group;
  g.plane->exchange(a.op, gather_transfers(a));
  PlaceArgs args{static_cast<const uint8_t*>(a.mine),
                 g.regions[g.rank] + g.layout.gather,
                 static_cast<uint8_t*>(a.out),
                 a.rows,
                 g.rank,
                 g.size,
                 {}};
  for (int r = 0; r <= g.size; ++r) args.first[r] = a.first[r] / word;
  const auto blocks = std::clamp<int64_t>(ceil_div(a.rows * args.first[g.size], kThreads), 1, g.max_blocks);
  launch("place_columns", word == 16 ? place_kernel<uint4> : place_kernel<uint32_t>,
         {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, args);
}

}  // namespace

void gather_columns(const GatherArgs& a) {
  const int size = a.group.size;
  const int64_t row_bytes = a.first[size];
  FP4MOE_CHECK(a.rows * row_bytes <= a.group.layout.gather_bytes,
               "a gather of " + std::to_string(a.rows) + " rows of " + std::to_string(row_bytes) +
                   " bytes; bytes that fit in the heap: " + std::to_string(a.group.layout.gather_bytes));
  int64_t word = 16;
  const auto out = static_cast<int64_t>(reinterpret_cast<intptr_t>(a.out));
  for (int r = 0; r <= size; ++r)
    while (a.first[r] % word != 0 || a.pitch % word != 0 || out % word != 0) word /= 2;
  FP4MOE_CHECK(word >= 4, "each rank's part of a row must be whole 4-byte words");
  if (word == 8) word = 4;
  if (a.group.plane != nullptr) {
    FP4MOE_CHECK(
        a.pitch == row_bytes && std::ranges::all_of(a.first_row, [](int64_t row) { return row == 0; }),
        "rows that are apart, or differ, need ranks that share memory");
    return staged_gather(a, word);
  }
  ColumnsArgs args{a.group,
                   a.op,
                   static_cast<const uint8_t*>(a.mine),
                   static_cast<uint8_t*>(a.out),
                   a.rows,
                   a.pitch / word,
                   {},
                   {}};
  std::copy_n(a.first_row, size, args.first_row);
  int64_t widest = 0;
  for (int r = 0; r <= size; ++r) args.first[r] = a.first[r] / word;
  for (int r = 0; r < size; ++r) widest = std::max(widest, args.first[r + 1] - args.first[r]);
  // The number is the same on every rank, since each rank waits for all blocks of its peers.
  const auto blocks = std::clamp<int64_t>(ceil_div(a.rows * widest, kThreads), 1, a.group.max_blocks);
  launch("gather", word == 16 ? gather_kernel<uint4> : gather_kernel<uint32_t>,
         {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, args);
}

void gather_shares(const GatherSharesArgs& a) {
  FP4MOE_CHECK(a.group.plane == nullptr && a.row_bytes % 4 == 0 &&
                   a.num_rows * a.row_bytes <= a.group.layout.gather_bytes,
               "a gather of " + std::to_string(a.num_rows) + " shared rows of " +
                   std::to_string(a.row_bytes) +
                   " bytes; bytes that fit in the heap: " + std::to_string(a.group.layout.gather_bytes));
  const auto blocks = std::clamp<int64_t>(a.num_rows, 1, a.group.max_blocks);
  SharesArgs args{a.group,
                  a.op,
                  static_cast<const uint32_t*>(a.x),
                  static_cast<uint32_t*>(a.out),
                  a.rows,
                  a.num_rows,
                  a.row_bytes / 4,
                  {}};
  std::copy_n(a.first, a.group.size + 1, args.first);
  launch("gather_shares", gather_shares_kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, args);
}

int gather_blocks_per_sm() {
  int wide = 0, narrow = 0, shares = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&wide, gather_kernel<uint4>, kThreads, 0);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&narrow, gather_kernel<uint32_t>, kThreads, 0);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&shares, gather_shares_kernel, kThreads, 0);
  return std::min({wide, narrow, shares});
}

}  // namespace fp4moe::cuda
