// The epilogue warps of few_tokens.cu: activation, the grid barrier, the sum over a token's experts. Device
// code only.
#pragma once

#include "formats/bf16.h"
#include "kernels/cuda/few_tokens_shared.cuh"
#include "kernels/cuda/ptx_order.cuh"
#include "kernels/cuda/ptx_sm90.cuh"

namespace fp4moe::few {

// A row block in the eyes of an epilogue warp, which has columns warp and warp + 4, two rows in each lane.
struct Piece {
  int expert, row_block;  // of U
  int first_row, columns;
  bool is_head;
  int last_cta;  // of the pieces of this sum
  int rows[2];

  __device__ Piece(const Shared& s, const Work& work, int unit, bool pairs) {
    const int lane = threadIdx.x % 32, k_tiles = work.phase.k_tiles;
    expert = unit / work.phase.row_blocks, row_block = unit % work.phase.row_blocks;
    first_row = s.first_row[expert], columns = s.first_row[expert + 1] - first_row;
    is_head = unit * k_tiles >= work.begin;
    last_cta = (unit + 1) * k_tiles <= work.end ? blockIdx.x : work.stripes.owner((unit + 1) * k_tiles - 1);
    rows[0] = pairs ? lane / 8 * 16 + lane % 8 : lane;
    rows[1] = rows[0] + (pairs ? 8 : 32);
  }
};

__device__ inline int epilogue_warp() { return threadIdx.x / 32 - kConsumerWarps; }
__device__ inline int epilogue_thread() { return threadIdx.x - kConsumerWarps * 32; }
__device__ inline void epilogue_barrier() { ptx::named_barrier(1, kEpilogueThreads); }

// The warp's sums of the consumers' groups.
struct Sums {
  float v[2][2];  // [column warp + 4 i][row]
};
__device__ inline Sums take_sums(Shared& s, const Piece& piece, int flushes) {
  const int buffer = flushes % 2;
  Sums sums;
  ptx::mbarrier_wait(&s.part_full[buffer], flushes / 2 % 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = epilogue_warp() + 4 * i;
    if (column >= piece.columns) break;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) sum += s.parts[buffer][g][column * kFewPartStride + piece.rows[r]];
      sums.v[i][r] = sum;
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s.part_empty[buffer]);
  return sums;
}

__device__ inline float* part_of(const Args& a, int cta, int column) {
  return a.parts + (cta * kFewMaxTokens + column) * kTileRows;
}

// The sums of the pieces behind a head, once they are published.
__device__ inline Sums take_pieces(const Args& a, const Shared& s, const Piece& piece) {
  Sums sums = {};
  if (epilogue_warp() >= piece.columns) return sums;
  for (int cta = blockIdx.x + 1; cta <= piece.last_cta; ++cta) {
    const uint32_t* flag = &a.counters->flags[cta * kEpilogueWarps + epilogue_warp()];
    while (ptx::load_acquire(flag) != static_cast<uint32_t>(s.call)) {
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (epilogue_warp() + 4 * i < piece.columns)
        for (int r = 0; r < 2; ++r)
          sums.v[i][r] += __ldcg(part_of(a, cta, epilogue_warp() + 4 * i) + piece.rows[r]);
  }
  return sums;
}

__device__ inline void put_piece(const Args& a, const Piece& piece, const Sums& sums, float scale) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (epilogue_warp() + 4 * i < piece.columns)
      for (int r = 0; r < 2; ++r)
        part_of(a, blockIdx.x, epilogue_warp() + 4 * i)[piece.rows[r]] = sums.v[i][r] * scale;
}

__device__ inline float activate(const Activation& act, float gate, float up) {
  switch (act.kind) {
    case ActivationKind::kSwigluOai: {
      const float g = gate > act.limit ? act.limit : gate;
      const float u = up > act.limit ? act.limit : (up < -act.limit ? -act.limit : up);
      return g / (1 + expf(-act.alpha * g)) * (u + act.beta);
    }
    case ActivationKind::kSilu:
      return gate / (1 + expf(-gate)) * up;
    default:
      return up < 0 ? 0 : up * up;
  }
}

__device__ inline void put_h(const Args& a, int row, int col, float value) {
  const int offset = few_act_offset(row, a.plan.down.k_tiles * kFewTileBytesOfRow, col);
  *reinterpret_cast<bf16*>(a.h + offset) = float_to_bf16(value);
}

// Gate and up of a row block: h of it, or the piece published.
__device__ inline void finish_up(const Args& a, Shared& s, const Piece& piece, int flushes) {
  const TiledExperts& experts = a.moe.experts;
  const auto i_size = static_cast<int>(experts.intermediate_size);
  const int lane = threadIdx.x % 32, e = s.expert[piece.expert];
  if (!piece.is_head) {
    put_piece(a, piece, take_sums(s, piece, flushes), 1);
    __syncwarp();
    if (lane == 0)
      ptx::store_release(&a.counters->flags[blockIdx.x * kEpilogueWarps + epilogue_warp()],
                         static_cast<uint32_t>(s.call));
    return;
  }
  const bool gated = is_gated(experts.activation.kind);
  int cols[2];  // of h: gated, both rows make one
  cols[0] = gated ? piece.row_block * 32 + lane : piece.row_block * 64 + lane;
  cols[1] = gated ? i_size + cols[0] : cols[0] + 32;
  float scales[2], bias[2] = {0, 0};
  scales[0] = experts.scales[e * 3 + (gated ? 0 : 1)];
  scales[1] = experts.scales[e * 3 + 1];
  if (experts.gate_up_bias != nullptr)
    for (int r = 0; r < 2; ++r)
      if (gated || cols[r] < i_size)
        bias[r] = experts.gate_up_bias[static_cast<int64_t>(e) * i_size * (gated ? 2 : 1) + cols[r]];
  const Sums pieces = take_pieces(a, s, piece);
  const Sums sums = take_sums(s, piece, flushes);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = epilogue_warp() + 4 * i, row = piece.first_row + column;
    if (column >= piece.columns) break;
    float v[2];
    for (int r = 0; r < 2; ++r) v[r] = (sums.v[i][r] + pieces.v[i][r]) * scales[r] + bias[r];
    if (gated) {
      put_h(a, row, cols[0], activate(experts.activation, v[0], v[1]));
      if (piece.row_block == a.plan.up.row_blocks - 1 && i_size % 64 != 0) put_h(a, row, cols[0] + 32, 0);
    } else {
      for (int r = 0; r < 2; ++r)
        put_h(a, row, cols[r], cols[r] < i_size ? activate(experts.activation, 0, v[r]) : 0);
    }
  }
}

// One thread: rows of h that this CTA's part of `down` reads -> shared memory, once all CTAs have written h.
__device__ inline void fetch_h(const Args& a, Shared& s, uint8_t* act) {
  const Work work(a, s, true);
  if (work.begin == work.end) return;
  const int first = s.first_row[work.first_expert()], last = s.first_row[work.last_expert() + 1];
  const int row_bytes = work.phase.k_tiles * kFewTileBytesOfRow;
  const uint64_t all = s.call * static_cast<uint64_t>(a.plan.num_ctas * kEpilogueWarps);
  while (ptx::load_acquire(&a.counters->arrivals) < all) {
  }
  ptx::fence_proxy_async_all();
  ptx::mbarrier_arrive_expect_tx(&s.h_full, (last - first) * row_bytes);
  for (int row = first; row < last; ++row)
    ptx::bulk_load(act + (row - first) * row_bytes, a.h + row * row_bytes, row_bytes, &s.h_full);
}

// Row block `row_block` of out, all tokens; the epilogue's threads.
__device__ inline void combine(const Args& a, const Shared& s, int row_block) {
  const DeviceMoeArgs& m = a.moe;
  const int tid = epilogue_thread(), r = tid % kTileRows, topk = static_cast<int>(m.topk);
  const auto h_size = static_cast<int>(m.experts.hidden_size);
  const int col = row_block * static_cast<int>(kTileRows) + r;
  if (col >= h_size) return;
  for (int t = tid / kTileRows; t < m.num_tokens; t += 2) {
    const int64_t at = static_cast<int64_t>(t) * h_size + col;
    const float before = m.out != nullptr && m.accumulate ? m.out[at] : 0;
    float sum = 0;
    for (int k0 = 0; k0 < topk; k0 += 8) {
      float v[8], second[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int slot = t * topk + k0 + j, row = k0 + j < topk ? s.row_of_slot[slot] : -1;
        v[j] = second[j] = 0;
        if (row < 0) continue;
        const int e = s.expert_of_slot[slot], cta = s.pieces[e] & 0xffff;
        v[j] = __ldcg(a.y + static_cast<int64_t>(row) * h_size + col);
        if (s.pieces[e] >> 16 > cta) second[j] = __ldcg(part_of(a, cta + 1, row - s.first_row[e]) + r);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int slot = t * topk + k0 + j, row = k0 + j < topk ? s.row_of_slot[slot] : -1;
        if (row < 0) continue;
        const int e = s.expert_of_slot[slot];
        v[j] += second[j];
        for (int cta = (s.pieces[e] & 0xffff) + 2; cta <= s.pieces[e] >> 16; ++cta)
          v[j] += __ldcg(part_of(a, cta, row - s.first_row[e]) + r);
        sum = fmaf(s.weight_of_slot[slot], v[j], sum);
      }
    }
    sum += before;
    if (m.out != nullptr) m.out[at] = sum;
    if (m.out_bf16 != nullptr) m.out_bf16[at] = float_to_bf16(sum);
  }
}

// Which CTAs have pieces of row block `row_block` of each expert; the epilogue's threads.
__device__ inline void find_pieces(Shared& s, const Work& work, int row_block) {
  const int e = epilogue_thread();
  if (e < s.num_experts) {
    const int tile = (e * work.phase.row_blocks + row_block) * work.phase.k_tiles;
    s.pieces[e] = work.stripes.owner(tile) | work.stripes.owner(tile + work.phase.k_tiles - 1) << 16;
  }
  epilogue_barrier();
}

// A row block of `down`: y or the piece.
__device__ inline void finish_down(const Args& a, Shared& s, const Piece& piece, int flushes) {
  const TiledExperts& experts = a.moe.experts;
  const auto h_size = static_cast<int>(experts.hidden_size);
  const int e = s.expert[piece.expert], col = piece.row_block * static_cast<int>(kTileRows);
  const float scale = experts.scales[e * 3 + 2];
  float bias[2] = {0, 0};
  if (experts.down_bias != nullptr && piece.is_head)
    for (int r = 0; r < 2; ++r)
      if (col + piece.rows[r] < h_size)
        bias[r] = experts.down_bias[static_cast<int64_t>(e) * h_size + col + piece.rows[r]];
  const Sums sums = take_sums(s, piece, flushes);
  if (!piece.is_head) return put_piece(a, piece, sums, scale);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = epilogue_warp() + 4 * i;
    if (column >= piece.columns) break;
    float* y = a.y + static_cast<int64_t>(piece.first_row + column) * h_size + col;
    for (int r = 0; r < 2; ++r)
      if (col + piece.rows[r] < h_size) y[piece.rows[r]] = sums.v[i][r] * scale + bias[r];
  }
}

// Counts this CTA's tiles of each row block; where they were the last of all experts', writes out.
__device__ inline void finish_blocks(const Args& a, Shared& s, const Work& work) {
  const int k_tiles = work.phase.k_tiles;
  for (int first = work.first_unit(); first < work.last_unit(); first += kEpilogueThreads) {
    const int unit = first + epilogue_thread();
    epilogue_barrier();
    bool is_last = false;
    if (unit < work.last_unit()) {
      uint32_t* done = &a.counters->blocks[unit % work.phase.row_blocks];
      const int tiles = min(work.end, (unit + 1) * k_tiles) - max(work.begin, unit * k_tiles);
      is_last = ptx::fetch_add(done, tiles) + tiles == static_cast<uint32_t>(s.num_experts * k_tiles);
      if (is_last) *done = 0;
    }
    s.is_last[epilogue_thread()] = is_last;
    epilogue_barrier();
    for (int i = 0; i < min(kEpilogueThreads, work.last_unit() - first); ++i) {
      if (!s.is_last[i]) continue;
      const int row_block = (first + i) % work.phase.row_blocks;
      find_pieces(s, work, row_block);
      combine(a, s, row_block);
      epilogue_barrier();
    }
  }
}

__device__ inline void run_epilogue(const Args& a, Shared& s, uint8_t* act) {
  int flushes = 0;
  if (s.num_experts == 0) {
    for (int block = blockIdx.x; block < a.plan.down.row_blocks; block += a.plan.num_ctas)
      combine(a, s, block);
    return;
  }
  const bool pairs = is_gated(a.moe.experts.activation.kind);
  const Work up(a, s, false), down(a, s, true);
  for (int unit = up.first_unit(); unit < up.last_unit(); ++unit)
    finish_up(a, s, Piece(s, up, unit, pairs), flushes++);
  ptx::fence_proxy_async_all();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::add_release(&a.counters->arrivals, 1);
  if (threadIdx.x == kConsumerWarps * 32) fetch_h(a, s, act);
  __syncwarp();
  for (int unit = down.first_unit(); unit < down.last_unit(); ++unit)
    finish_down(a, s, Piece(s, down, unit, false), flushes++);
  finish_blocks(a, s, down);
}

}  // namespace fp4moe::few
