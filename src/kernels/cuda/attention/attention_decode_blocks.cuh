// Blocks of keys and values in the shared memory of decode's attention, for either type of pages: their
// layout, the gather from the pages, and the products with them. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention/attention_new_token.cuh"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/ptx/attention_ptx.cuh"

namespace fp4moe::cuda {

constexpr int kMaxGroup = 16;
// Query heads in a lane's fragments: g and g + 8, or only g if the sums of both would need too many
// registers.
template <int D>
constexpr int kLaneHeads = D <= 128 ? 2 : 1;

// The contribution of a worker (a warp) to 16 columns of a head.
struct alignas(16) WorkerSums {
  float sums[16];
  float largest, denominator;
};

// A warp's block of keys or values: lines of 8 pieces of 16 bytes. Piece i of a row of at least 128 bytes is
// in the row's line i / 8; two rows of 64 bytes share a line. Lines are aligned: with lines at an odd
// multiple of 16 bytes, decode with heads of 64 takes 20 % longer.
template <class P, int D>
struct alignas(128) KeyBlock {
  static constexpr int kPieces = D * P::kBytes / 16;  // of a row: 4, 8 or 16
  static constexpr int kLines = P::kBlockKeys * kPieces / 8;
  static constexpr int kChunksPerPiece = 16 / sizeof(typename P::Chunk);
  uint4 lines[kLines][8];

  __device__ __forceinline__ uint4* piece(int key, int i, int swizzle) {
    if constexpr (kPieces < 8)
      return &lines[key / 2][(key % 2 * 4 + i) ^ swizzle];
    else
      return &lines[i / 8 * P::kBlockKeys + key][i % 8 ^ swizzle];
  }
  // The pieces of keys and of values are permuted differently, so that lanes which read at once do not have
  // bank conflicts: they read chunks of adjacent keys, or of the values of every other key.
  __device__ __forceinline__ uint4* key_piece(int key, int i) { return piece(key, i, P::key_swizzle(key)); }
  __device__ __forceinline__ uint4* value_piece(int key, int i) { return piece(key, i, key / 2 % 4 * 2); }
  __device__ __forceinline__ typename P::Chunk& key_chunk(int key, int c) {
    return reinterpret_cast<typename P::Chunk*>(key_piece(key, c / kChunksPerPiece))[c % kChunksPerPiece];
  }
  __device__ __forceinline__ typename P::Chunk& value_chunk(int key, int c) {
    return reinterpret_cast<typename P::Chunk*>(value_piece(key, c / kChunksPerPiece))[c % kChunksPerPiece];
  }
};

// Whether heads of D elements can be normed before they are rotated.
template <int D>
constexpr bool kHasNorms = D >= 128;

template <class P, int D, int S, int W>
struct Shared {
  Turn turns[D / 2];                     // for the row's position
  float norms[2][kHasNorms<D> ? D : 1];  // weights of the norms of queries and of keys
  float sinks[kMaxGroup];                // of the kv head's query heads
  KeyBlock<P, D> keys[S][W];
  KeyBlock<P, D> values[S][W];
  WorkerSums parts[1];  // [units of this block][workers]
};

// The state that a warp keeps for its row: lane (g, q) = (lane / 4, lane % 4).
template <int D>
struct Warp {
  static constexpr int kHeads = kLaneHeads<D>;
  uint32_t q[D / 16][2 * kHeads];  // A fragments: heads g and g + 8
  float out[D / 8][2 * kHeads];    // heads g (0, 1) and g + 8 (2, 3), columns 64 c + 8 (2 q + i) + j at
                                   // [8 c + j][i]
  float largest[kHeads], denominator[kHeads];
};

// P::mma for fragments of one or two heads per lane; without the second, its rows of A are zeros.
template <class P>
__device__ __forceinline__ void mma_heads(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  P::mma(c, a, b0, b1);
}
template <class P>
__device__ __forceinline__ void mma_heads(float (&c)[4], const uint32_t (&a)[2], uint32_t b0, uint32_t b1) {
  P::mma(c, {a[0], 0, a[1], 0}, b0, b1);
}
template <class P>
__device__ __forceinline__ void mma_heads(float (&c)[2], const uint32_t (&a)[2], uint32_t b0, uint32_t b1) {
  float rows[4] = {c[0], c[1], 0, 0};
  mma_heads<P>(rows, a, b0, b1);
  c[0] = rows[0], c[1] = rows[1];
}

// Starts to load a block of keys and values. rows_of_block: in lane i, the page row of the block's key i
// modulo the block's keys. Eight lanes fetch 128 bytes: of one row, or of two rows of 64 bytes.
template <class P, int D, int S, int W>
__device__ __forceinline__ void load_block(const AttentionParams& p, int rows_of_block, int stage,
                                           Shared<P, D, S, W>& shared) {
  constexpr int kRowLanes = KeyBlock<P, D>::kPieces < 8 ? 4 : 8, kRows = 32 / kRowLanes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % kRowLanes;
#pragma unroll
  for (int i = 0; i < P::kBlockKeys / kRows; ++i) {
    const int key = kRows * i + lane / kRowLanes;
    const int64_t row = __shfl_sync(~0u, rows_of_block, key);
    const uint8_t* k = p.k + row * p.k_stride * P::kBytes + c * 16;
    const uint8_t* v = p.v + row * p.v_stride * P::kBytes + c * 16;
#pragma unroll
    for (int part = 0; part < KeyBlock<P, D>::kPieces / kRowLanes; ++part) {
      const int piece = part * 8 + c, column = piece * (16 / P::kBytes);
      ptx::cp_async16(ptx::shared_address(shared.keys[stage][warp].key_piece(key, piece)), k + part * 128,
                      column < p.k_dim ? 16 : 0);
      ptx::cp_async16(ptx::shared_address(shared.values[stage][warp].value_piece(key, piece)), v + part * 128,
                      column < p.v_dim ? 16 : 0);
    }
  }
}

// Puts the new token into the last block, which has landed, and zeros in place of keys outside the row's
// range, whose pages can contain arbitrary data.
template <class P, int D, int S, int W>
__device__ __forceinline__ void put_new_token(const NewToken<P, D>& token, int stage, int first_key,
                                              int2 keys, Shared<P, D, S, W>& shared) {
  const int lane = lane_read_here() & 31, warp = threadIdx.x / 32;
  const typename P::Chunk zero = {};
#pragma unroll
  for (int i = 0; i < P::kBlockKeys / 8; ++i) {
    const int at = lane / 4 + 8 * i, key = first_key + at;
    if (key >= keys.x && key < keys.y) continue;
#pragma unroll
    for (int c = 0; c < D / 32; ++c)
      shared.keys[stage][warp].key_chunk(at, 4 * c + lane % 4) = key == keys.y ? token.key[c] : zero;
  }
#pragma unroll
  for (int i = 0; i < P::kBlockKeys / 4; ++i) {
    const int at = 2 * (lane % 4) + i % 2 + i / 2 * 8, key = first_key + at;
    if (key >= keys.x && key < keys.y) continue;
#pragma unroll
    for (int c = 0; c < D / 64; ++c)
      shared.values[stage][warp].value_chunk(at, 8 * c + lane / 4) = key == keys.y ? token.value[c] : zero;
  }
  __syncwarp();
}

// Computes the logits of a block: s[i] for keys 8 i + 2 q and 8 i + 2 q + 1 (heads g and g + 8).
template <class P, int D, int S, int W>
__device__ __forceinline__ void multiply_keys(Shared<P, D, S, W>& shared, int stage, const Warp<D>& w,
                                              float (&s)[P::kBlockKeys / 8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int c = 0; c < D / 32; ++c)
#pragma unroll
    for (int i = 0; i < P::kBlockKeys / 8; ++i) {
      uint32_t pairs[4];
      P::unpack(shared.keys[stage][warp].key_chunk(lane / 4 + 8 * i, 4 * c + lane % 4), pairs);
      mma_heads<P>(s[i], w.q[2 * c], pairs[0], pairs[1]);
      mma_heads<P>(s[i], w.q[2 * c + 1], pairs[2], pairs[3]);
    }
}

// weights: the A fragments of each 16 keys.
template <class P, int D, int S, int W>
__device__ __forceinline__ void multiply_values(
    Shared<P, D, S, W>& shared, int stage, const uint32_t (&weights)[P::kBlockKeys / 16][2 * kLaneHeads<D>],
    Warp<D>& w) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 0; step < P::kBlockKeys / 16; ++step)
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      typename P::Chunk v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 16 * step + 2 * (lane % 4) + i % 2 + i / 2 * 8;
        v[i] = shared.values[stage][warp].value_chunk(key, 8 * c + lane / 4);
      }
      uint32_t first[8], second[8];
      P::zip(v[0], v[1], first);
      P::zip(v[2], v[3], second);
#pragma unroll
      for (int j = 0; j < 8; ++j) mma_heads<P>(w.out[8 * c + j], weights[step], first[j], second[j]);
    }
}

}  // namespace fp4moe::cuda
