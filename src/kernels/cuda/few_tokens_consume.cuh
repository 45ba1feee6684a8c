// The consumer warps of few_tokens.cu: tiles times rows of x or h. Device code only.
#pragma once

#include "kernels/cuda/few_tokens_shared.cuh"
#include "kernels/cuda/fp4_dequant.cuh"
#include "kernels/cuda/ptx_mma.cuh"
#include "kernels/cuda/ptx_order.cuh"
#include "kernels/cuda/ptx_sm90.cuh"

namespace fp4moe::few {

// What a consumer lane knows of the row block at hand.
struct Block {
  int unit, begin;         // its number in the phase, its first tile
  int columns;             // tokens of its expert
  const uint8_t *b0, *b1;  // B fragments of k tile 0: steps 0 and 1, steps 2 and 3

  __device__ void enter(const Args& a, const Shared& s, const Work& work, bool down, const uint8_t* act) {
    const int lane = threadIdx.x % 32, e = unit / work.phase.row_blocks;
    begin = unit * work.phase.k_tiles;
    columns = s.first_row[e + 1] - s.first_row[e];
    const int row = s.first_row[e] + min(lane / 4, columns - 1);
    const int index = down ? row : s.token_of_row[row], half = index % 2 * 64;
    const int place = down ? row - s.first_row[work.first_expert()] : index;
    b0 = act + place * work.phase.k_tiles * kFewTileBytesOfRow + half + lane % 4 * 16;
    b1 = b0 + 64 - 2 * half;
  }
};

// The sums of a row block -> buffer number `flushes`; then zeros.
__device__ inline void flush(Shared& s, const Block& block, int flushes, float (&sum)[kFewStageTiles][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, buffer = flushes % 2;
  ptx::mbarrier_wait(&s.part_empty[buffer], (flushes / 2 % 2) ^ 1);
  float* part = s.parts[buffer][warp / 4];
  const int row = warp % 4 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = lane % 4 * 2 + i % 2;
    if (column < block.columns) part[column * kFewPartStride + row + i / 2 * 8] = sum[0][i] + sum[1][i];
    sum[0][i] = sum[1][i] = 0;
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(&s.part_full[buffer]);
}

// A tile's B fragments.
struct Operand {
  uint4 low, high;  // k steps 0 and 1, 2 and 3

  __device__ void load(const Block& block, int tile) {
    const int offset = (tile - block.begin) * kFewTileBytesOfRow;
    low = *reinterpret_cast<const uint4*>(block.b0 + offset);
    high = *reinterpret_cast<const uint4*>(block.b1 + offset);
  }
};

template <Fp4Format kFormat>
__device__ __forceinline__ void multiply(const TileWords<kFormat>& words, const Operand& b, float (&sum)[4]) {
  uint32_t w[4];
  words.decode(0, w);
  ptx::mma_bf16(sum, w, b.low.x, b.low.y);
  words.decode(1, w);
  ptx::mma_bf16(sum, w, b.low.z, b.low.w);
  words.decode(2, w);
  ptx::mma_bf16(sum, w, b.high.x, b.high.y);
  words.decode(3, w);
  ptx::mma_bf16(sum, w, b.high.z, b.high.w);
}

template <Fp4Format kFormat>
__device__ inline void consume(const Args& a, Shared& s, const uint8_t* act, const uint8_t* ring) {
  constexpr int kBytes = static_cast<int>(tile_bytes(kFormat));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int step = warp / 4;  // of the stream; a group takes every kGroups-th
  int flushes = 0, stage = step, first_step = 0;
  uint32_t lap = 0;
  float sum[kFewStageTiles][4] = {};
  for (int down = 0; down < 2; ++down) {
    const Work work(a, s, down);
    if (work.begin == work.end) continue;
    if (down) ptx::mbarrier_wait(&s.h_full, 0);
    const int k_tiles = work.phase.k_tiles;
    const int end_step = first_step + work.steps();
    Block block{work.first_unit()};
    block.enter(a, s, work, down, act);
    for (; step < end_step; step += kGroups) {
      const int tile = work.begin + (step - first_step) * kFewStageTiles;
      ptx::mbarrier_wait(&s.full[stage], lap & 1);
      const uint8_t* tiles = ring + stage * (kFewStageTiles * kBytes);
      TileWords<kFormat> words[kFewStageTiles];  // one past the end is not used
      Operand b[kFewStageTiles];
#pragma unroll
      for (int i = 0; i < kFewStageTiles; ++i) words[i].load(tiles + i * kBytes, warp % 4, lane);
      if (tile >= block.begin && tile + kFewStageTiles <= min(work.end, block.begin + k_tiles)) {
#pragma unroll
        for (int i = 0; i < kFewStageTiles; ++i) b[i].load(block, tile + i);
#pragma unroll
        for (int i = 0; i < kFewStageTiles; ++i) multiply(words[i], b[i], sum[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kFewStageTiles; ++i) {
          if (tile + i >= work.end) break;
          while (tile + i >= block.begin + k_tiles) {
            flush(s, block, flushes++, sum);
            ++block.unit;
            block.enter(a, s, work, down, act);
          }
          b[i].load(block, tile + i);
          multiply(words[i], b[i], sum[i]);
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&s.empty[stage]);
      for (stage += kGroups; stage >= a.plan.num_stages; stage -= a.plan.num_stages) ++lap;
    }
    first_step = end_step;
    flush(s, block, flushes++, sum);
    while (block.begin + k_tiles < work.end) {
      ++block.unit;
      block.enter(a, s, work, down, act);
      flush(s, block, flushes++, sum);
    }
  }
}

}  // namespace fp4moe::few
