// Shared by the attention kernels: their arguments, the row tiles of a ragged batch, and rows of pages.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/ptx/launch.h"
#include "kernels/ops.h"

namespace fp4moe::cuda {

// If k is not null, a launch for decode first applies the norms (if any) and rope to queries and keys, and
// writes the new keys and values into their pages.
struct RopeParams {
  const float *k, *v;  // [T, stride]: the new tokens' rows
  int64_t stride;
  const float* inv_freq;
  float factor;
  int half;  // of the rotary dims, which are a head's first ones
  QkNorm norm;
};

// The arguments of one launch. G query heads share a kv head; positions, and row numbers within pages, fit in
// 32 bits.
// Large because it is the only argument of three kernels: one struct is copied into the constant
// bank, and each kernel reads the fields that it needs from there.
struct AttentionParams {
  const float* q;
  int64_t q_stride, out_cols;
  uint8_t *k, *v;  // pages of bf16, or of E4M3 codes if is_fp8
  bool is_fp8;
  float k_inverse, v_inverse, v_scale;  // of the codes (KvPages::scale); 1 for bf16. scale_log2 has the keys'
  int k_stride, v_stride, k_dim, v_dim;
  int num_kv_heads, group;  // G
  int page_shift, max_pages;
  const int32_t *row_sequence, *first_row, *first_position, *page_table;
  const int64_t* positions;
  int num_rows, num_sequences, window;  // window 0: all
  float scale_log2;                     // log2(e) * scale * the scale of the keys' codes
  const float* sinks;
  void* out;
  bool out_f32;
  RopeParams rope;    // decode only
  const float* gate;  // decode only: RopeAttentionArgs::gate
  int64_t gate_stride;
};

constexpr float kLog2e = 1.44269504f;
constexpr int kMaxCluster = 16;  // blocks

// splits: blocks per cluster, for blocks of 4 warps; max_keys: upper bound on the number of a row's keys.
void launch_attention_decode(const AttentionParams& p, int splits, int64_t max_keys);
void launch_attention_prefill(const AttentionParams& p);
void launch_attention_mla(const AttentionParams& p, int splits);

// A tile of query rows: rows [first, first + tile rows) of a sequence's tokens x G heads, token-major.
struct RowTile {
  int sequence = -1;  // -1: no tile
  int first = 0;
  int num_tokens = 0, first_row = 0, first_position = 0;  // the sequence's
};

#ifdef __CUDACC__

// Returns tile `index` of the batch, in order of decreasing work: the last sequence first, each sequence from
// its end. Called by whole warps; all lanes get the result.
__device__ __forceinline__ RowTile find_row_tile(const AttentionParams& p, int tile_rows, int index) {
  const int lane = threadIdx.x % 32;
  RowTile tile;
  for (int base = 0; base < p.num_sequences; base += 32) {
    const int s = p.num_sequences - 1 - base - lane;
    int begin = 0, tokens = 0;
    if (s >= 0) begin = p.first_row[s], tokens = p.first_row[s + 1] - begin;
    const int tiles = (tokens * p.group + tile_rows - 1) / tile_rows;
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    const unsigned reached = __ballot_sync(~0u, sum > index);
    if (reached != 0) {
      const int owner = __ffs(static_cast<int>(reached)) - 1;
      tile.sequence = p.num_sequences - 1 - base - owner;
      tile.first = (__shfl_sync(~0u, sum, owner) - 1 - index) * tile_rows;
      tile.num_tokens = __shfl_sync(~0u, tokens, owner);
      tile.first_row = __shfl_sync(~0u, begin, owner);
      tile.first_position = p.first_position[tile.sequence];
      return tile;
    }
    index -= __shfl_sync(~0u, sum, 31);
  }
  return tile;
}

// Returns the most tiles that a batch can have, whatever its sequences are.
inline int max_row_tiles(const AttentionParams& p, int tile_rows) {
  const int64_t rows = static_cast<int64_t>(p.num_rows) * p.group;
  return static_cast<int>(rows / tile_rows + (p.num_sequences < p.num_rows ? p.num_sequences : p.num_rows));
}

// The keys that a tile's rows see: [first, end), and begin, which is first rounded down to a whole tile of
// keys, so that a row's sums do not depend on the other rows in its tile. The pages of keys before `first`
// may have been released.
struct KeyRange {
  int begin, end, first;

  __device__ __forceinline__ bool has(int key) const { return key >= first && key < end; }
  __device__ __forceinline__ int nearest(int key) const { return max(first, min(key, end - 1)); }
};
__device__ __forceinline__ KeyRange keys_of_tile(const AttentionParams& p, const RowTile& t, int tile_rows,
                                                 int tile_keys) {
  const int first = t.first_position + t.first / p.group;
  const int last_row = min(t.first + tile_rows, t.num_tokens * p.group) - 1;
  const int begin = p.window > 0 ? max(0, first - p.window + 1) : 0;
  return {begin / tile_keys * tile_keys, t.first_position + last_row / p.group + 1, begin};
}

// Returns the row of the pages that holds a key of a kv head.
__device__ __forceinline__ int page_row(const AttentionParams& p, int sequence, int kv_head, int key) {
  const int page = p.page_table[static_cast<int64_t>(sequence) * p.max_pages + (key >> p.page_shift)];
  return ((page * p.num_kv_heads + kv_head) << p.page_shift) + (key & ((1 << p.page_shift) - 1));
}

// Writes this block's share of the zeros to the rows past those of the last sequence.
__device__ __forceinline__ void clear_padding_rows(const AttentionParams& p, int block, int num_blocks) {
  for (int64_t row = p.first_row[p.num_sequences] + block; row < p.num_rows; row += num_blocks)
    for (int64_t c = threadIdx.x; c < p.out_cols; c += blockDim.x) {
      const int64_t i = row * p.out_cols + c;
      if (p.out_f32)
        static_cast<float*>(p.out)[i] = 0;
      else
        static_cast<uint16_t*>(p.out)[i] = 0;
    }
}

#endif

}  // namespace fp4moe::cuda
