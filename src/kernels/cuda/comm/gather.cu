// Gathers rows whose columns are distributed over the GPUs of a group.
//
// Computes:  out [rows, W]: rank r has the bytes [first_r, first_{r+1}) of each row; all ranks get whole
//            rows.
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

struct ColumnsArgs {
  CommGroup group;
  CommOp op;
  const uint8_t* mine;
  uint8_t* out;
  int64_t rows;
  int64_t first[kMaxGroupRanks + 1];  // in words of the kernel's type
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
  const int64_t staging = a.group.layout.gather + int64_t{o.parity()} * a.group.layout.gather_bytes;
  const auto* const mine = reinterpret_cast<const Word*>(a.mine);
  auto* const out = reinterpret_cast<Word*>(a.out);
  const int64_t cols = a.first[me + 1] - a.first[me];
  for (int64_t i = thread; i < a.rows * cols; i += threads) {
    const int64_t to = i / cols * width + a.first[me] + i % cols;
    const Word v = __ldcg(mine + i);
    out[to] = v;
    for (int r = 0; r < size; ++r)
      if (r != me) reinterpret_cast<Word*>(a.group.regions[r] + staging)[to] = v;
  }
  __syncthreads();
  raise_flags(o, blockIdx.x);
  wait_for_flags(o, static_cast<int>(gridDim.x));
  const auto* const arrived = reinterpret_cast<const Word*>(a.group.regions[me] + staging);
  const int64_t others = width - cols;
  for (int64_t i = thread; i < a.rows * others; i += threads) {
    const int64_t col = i % others, at = i / others * width + (col < a.first[me] ? col : col + cols);
    out[at] = __ldcg(arrived + at);
  }
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
  for (int r = 0; r <= size; ++r)
    while (a.first[r] % word != 0) word /= 2;
  FP4MOE_CHECK(word >= 4, "each rank's part of a row must be whole 4-byte words");
  if (word == 8) word = 4;
  if (a.group.plane != nullptr) return staged_gather(a, word);
  ColumnsArgs args{a.group, a.op, static_cast<const uint8_t*>(a.mine), static_cast<uint8_t*>(a.out),
                   a.rows,  {}};
  int64_t widest = 0;
  for (int r = 0; r <= size; ++r) args.first[r] = a.first[r] / word;
  for (int r = 0; r < size; ++r) widest = std::max(widest, args.first[r + 1] - args.first[r]);
  // The number is the same on every rank, since each rank waits for all blocks of its peers.
  const auto blocks = std::clamp<int64_t>(ceil_div(a.rows * widest, kThreads), 1, a.group.max_blocks);
  launch("gather", word == 16 ? gather_kernel<uint4> : gather_kernel<uint32_t>,
         {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, args);
}

int gather_blocks_per_sm() {
  int wide = 0, narrow = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&wide, gather_kernel<uint4>, kThreads, 0);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&narrow, gather_kernel<uint32_t>, kThreads, 0);
  return std::min(wide, narrow);
}

}  // namespace fp4moe::cuda
