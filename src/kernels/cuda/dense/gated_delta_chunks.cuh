// What the kernels of the gated delta net's chunked form share: which rows a chunk has, and the layout of the
// data between the kernels. Device code, except for the parameters.
//
// A chunk has the rows of one sequence at kDeltaChunk positions from a multiple of kDeltaChunk; other rows of
// it are zeros with decay 1, which change nothing. A pass runs the chunks [first_chunk, first_chunk +
// num_chunks) of the batch, counted over all sequences with chunks, in order.
#pragma once

#include "kernels/cuda/dense/gated_delta_chunks.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe::cuda {

constexpr int kDeltaTileBytes = kDeltaChunk * kDeltaDim * 2;      // a bf16 matrix [chunk, dim]
constexpr int kDeltaSquareBytes = kDeltaChunk * kDeltaChunk * 2;  // a bf16 matrix [chunk, chunk]
constexpr int kDeltaTileCols = 16;                                // of v, in a tile
constexpr int kDeltaTiles = kDeltaDim / kDeltaTileCols;

// A key head's data: k and q (key_offset), the rounded values and the rest.
struct DeltaKeys {
  uint8_t k_high[kDeltaTileBytes], k_low[kDeltaTileBytes], q_high[kDeltaTileBytes], q_low[kDeltaTileBytes];
};
// A value head's data, with G the sums of g over the chunk's rows so far: T = (I + A)^-1 diag(beta) and
// P = (q_i . k_j) exp(G_i - G_j), both lower triangular. The 16 x 16 blocks above the diagonal are not
// written.
struct DeltaMatrices {
  uint8_t t_high[kDeltaSquareBytes], t_low[kDeltaSquareBytes];
  uint8_t p_high[kDeltaSquareBytes], p_low[kDeltaSquareBytes];
  float from_start[kDeltaChunk];  // exp(G_i)
  float to_end[kDeltaChunk];      // exp(G_last - G_i)
};
// v of a value head, as the accumulators of mma_bf16 for v^T: lane's {column g: rows 2 t, 2 t + 1; column g +
// 8: likewise} of 8 rows. Then in its place the outputs before norm and gate.
struct DeltaValues {
  float4 of[kDeltaTiles][kDeltaChunk / 8][32];
};

struct ChunkParams {
  GatedDeltaArgs args;
  DeviceStates sequences;
  int first_chunk = 0, num_chunks = 0;
  bool runs_beside = false;           // starts while the kernels before it run, and ends after them
  DeltaKeys* keys = nullptr;          // [num_chunks, Hk]
  DeltaMatrices* matrices = nullptr;  // [num_chunks, Hv]
  DeltaValues* values = nullptr;      // [num_chunks, Hv]
};

// Called first and last by the kernels that may run beside others. One block waits for the others' kernels,
// the last to start: it keeps the grid from being complete before they are, so that later kernels need to
// wait for this grid alone, and the other blocks make room on their SMs.
__device__ __forceinline__ void wait_at_start(const ChunkParams& p) {
  if (!p.runs_beside) ptx::grid_dependency_wait();
}
__device__ __forceinline__ void wait_at_end(const ChunkParams& p) {
  if (p.runs_beside && blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1)
    ptx::grid_dependency_wait();
}

// A sequence that runs in chunks.
struct ChunkedSequence {
  int index = -1;  // -1: no such sequence
  int first_chunk = 0, num_chunks = 0;
  int first_row = 0, num_rows = 0, first_position = 0, slot = 0;
};

struct ChunkRows {
  int64_t first_row;  // of the sequence in the batch
  int num_rows;       // of the sequence
  int offset;         // the sequence's row that is the chunk's row 0; may be negative
  int slot;
  bool is_new;  // the sequence has no state before its first row
  __device__ bool has(int row) const { return row + offset >= 0 && row + offset < num_rows; }
  __device__ int64_t batch_row(int row) const { return first_row + offset + row; }
};

// Returns a sequence, except for its first chunk; no chunks if it does not run in chunks. Loads all before it
// uses any, because each load takes as long as the L2.
__device__ __forceinline__ ChunkedSequence load_sequence(const DeviceStates& of, int index) {
  const int first_row = of.first_row[index], end_row = of.first_row[index + 1],
            position = of.first_position[index], slot = of.slots[index],
            others = of.num_replayed[index] | of.num_tentative[index];
  const int rows = end_row - first_row;
  const bool has_chunks = rows >= kMinChunkedRows && others == 0;
  const int num_chunks = has_chunks ? (position % kDeltaChunk + rows + kDeltaChunk - 1) / kDeltaChunk : 0;
  return {index, 0, num_chunks, first_row, rows, position, slot};
}

// Returns the sequence that has `chunk`, or if that is negative the rank-th sequence with chunks. Called by
// whole warps.
__device__ __forceinline__ ChunkedSequence find_sequence(const ChunkParams& p, int chunk, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_sequences = static_cast<int>(p.sequences.num_sequences);
  int chunks_before = 0, sequences_before = 0;
  for (int base = 0; base < num_sequences; base += 32) {
    const ChunkedSequence candidate =
        base + lane < num_sequences ? load_sequence(p.sequences, base + lane) : ChunkedSequence{};
    const int own = candidate.num_chunks;
    int end = own;  // of the sequence's chunks, from chunks_before
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(~0u, end, offset);
      if (lane >= offset) end += other;
    }
    const int first = chunks_before + end - own;
    const unsigned with_chunks = __ballot_sync(~0u, own > 0);
    const int own_rank = sequences_before + __popc(with_chunks & ((1u << lane) - 1));
    const bool is_it = own > 0 && (chunk < 0 ? own_rank == rank : chunk >= first && chunk < first + own);
    if (const unsigned found = __ballot_sync(~0u, is_it); found != 0) {
      const int at = __ffs(static_cast<int>(found)) - 1;
      const auto of_lane = [at](int x) { return __shfl_sync(~0u, x, at); };
      return {base + at,
              of_lane(first),
              of_lane(own),
              of_lane(candidate.first_row),
              of_lane(candidate.num_rows),
              of_lane(candidate.first_position),
              of_lane(candidate.slot)};
    }
    chunks_before += __shfl_sync(~0u, end, 31);
    sequences_before += __popc(with_chunks);
  }
  return {};
}

__device__ __forceinline__ ChunkRows chunk_rows(const ChunkedSequence& s, int chunk) {
  return {s.first_row, s.num_rows, (chunk - s.first_chunk) * kDeltaChunk - s.first_position % kDeltaChunk,
          s.slot, s.first_position == 0};
}

// The convolution's input `row` rows after the sequence's first new row; negative rows are in the slot.
__device__ __forceinline__ float chunk_input(const GatedDeltaArgs& a, const ChunkRows& c, int row,
                                             int64_t channel) {
  const int kept = a.conv_width - 1;
  const bool is_new = row >= 0, exists = is_new ? row < c.num_rows : row >= -kept && !c.is_new;
  const float* const at = is_new ? a.qkv + (c.first_row + row) * a.qkv_stride + channel
                                 : a.conv(c.slot) + (channel + 1) * kept + row;
  return exists ? __ldcg(at) : 0;
}

// Offset of a bf16 element of a swizzled tile, whose rows have row_bytes bytes: the 16-byte vectors of 8 rows
// at one column are in different banks.
__device__ __forceinline__ int swizzled(int row, int column, int row_bytes) {
  return row * row_bytes + ((column / 8 ^ row % 8) * 16) + column % 8 * 2;
}
// Offset of a bf16 element of k or q [kDeltaChunk, kDeltaDim]: panels of 64 columns, whose rows of 128 bytes
// have swizzled 16-byte vectors, as wgmma reads them (wgmma_order.cuh).
__device__ __forceinline__ int key_offset(int row, int column) {
  return column / 64 * (kDeltaChunk * 128) + swizzled(row, column % 64, 128);
}

}  // namespace fp4moe::cuda
