// How data comes to the warps of few_tokens.cu: tables of rows, x and h into shared memory, the stream of
// weights. Device code only.
#pragma once

#include "kernels/cuda/few_tokens_shared.cuh"
#include "kernels/cuda/fp4_dequant.cuh"
#include "kernels/cuda/ptx_order.cuh"
#include "kernels/cuda/ptx_sm90.cuh"

namespace fp4moe::few {

// The helper warp: rows of the active experts' tokens.
__device__ inline void find_rows(const DeviceMoeArgs& m, Shared& s) {
  const int lane = threadIdx.x % 32, topk = static_cast<int>(m.topk);
  float weights[2];  // on their way before anything waits
  for (int i = 0; i < 2; ++i) {
    const int slot = lane + 32 * i;
    weights[i] = slot < m.num_tokens * topk && m.weights != nullptr ? m.weights[slot] : 1;
  }
  const Routing routing(m);
  for (int i = 0; i < 2; ++i) {
    const int slot = lane + 32 * i;
    s.weight_of_slot[slot] = weights[i];
    s.tokens[slot] = 0;
    if (routing.id[i] >= 0 && routing.first[i] == slot) s.expert[routing.rank(i)] = routing.id[i];
  }
  if (lane == 0) s.num_experts = routing.num_experts();
  __syncwarp();
  for (int i = 0; i < 2; ++i)
    if (routing.id[i] >= 0) atomicOr(&s.tokens[routing.rank(i)], 1u << ((lane + 32 * i) / topk));
  __syncwarp();
  int before = 0;
  for (int i = 0; i < 2; ++i) {
    const int e = lane + 32 * i;
    int rows = __popc(s.tokens[e]);
    for (int d = 1; d < 32; d *= 2) {
      const int left = __shfl_up_sync(~0u, rows, d);
      if (lane >= d) rows += left;
    }
    s.first_row[e + 1] = before + rows;
    before += __shfl_sync(~0u, rows, 31);
  }
  if (lane == 0) s.first_row[0] = 0;
  __syncwarp();
  for (int i = 0; i < 2; ++i) {
    const int slot = lane + 32 * i, t = slot / topk, e = routing.rank(i);
    const int row = routing.id[i] < 0 ? -1 : s.first_row[e] + __popc(s.tokens[e] & ((1u << t) - 1));
    s.row_of_slot[slot] = row;
    if (row >= 0) s.token_of_row[row] = t;
  }
}

// Row by row of x in shared memory, of all warps but the helper: f(the word's address, its token and column).
template <class F>
__device__ __forceinline__ void for_words_of_x(const Args& a, uint8_t* act, const F& f) {
  const int lane = threadIdx.x % 32, row_bytes = a.plan.up.steps() * kFewRowStepBytes;
  const int tiles = a.plan.up.steps() * kFewStepTiles;
  for (int i = threadIdx.x / 32; i < tiles * static_cast<int>(a.moe.num_tokens); i += kWarps) {
    const int t = i / tiles, col = i % tiles * 64 + 2 * lane;
    f(act + few_act_offset(t, row_bytes, few_act_word(col)), t, col);
  }
}

// x -> shared memory, asynchronously; zeros past H.
__device__ inline void stage_x(const Args& a, uint8_t* act) {
  const auto h = static_cast<int>(a.moe.experts.hidden_size);
  for_words_of_x(a, act, [&](uint8_t* word, int t, int col) {
    ptx::cp_async4(ptx::shared_address(word), a.moe.x + static_cast<int64_t>(t) * h + min(col, h - 2),
                   col < h ? 4 : 0);
  });
  ptx::cp_async_commit();
}

// What stage_x() has brought, once it has, times 2^64: codes alone are worth 2^-126, which f32 sums do not
// bear.
__device__ inline void scale_x(const Args& a, uint8_t* act) {
  for_words_of_x(a, act, [&](uint8_t* at, int, int) {
    auto* word = reinterpret_cast<uint32_t*>(at);
    *word = bf16x2_mul(*word, kActFactor);
  });
}

// Words that other CTAs write and that may not be there yet.
struct TwoWords {
  Word a, b;
  __device__ bool there() const { return a >> 32 != 0 && b >> 32 != 0; }
};
__device__ __forceinline__ TwoWords load_words(const Word* p) {
  TwoWords w;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w.a), "=l"(w.b) : "l"(p) : "memory");
  return w;
}
__device__ __forceinline__ void store_word(Word* p, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(kThere | value) : "memory");
}

// Words of a row of h.
__device__ inline int h_words(const Args& a) { return a.plan.down.k_tiles * 32; }

// The helper warp: no word of h and y is there; then waits until all CTAs have said so.
__device__ inline void clear_words(const Args& a, Shared& s) {
  const int lane = threadIdx.x % 32, rows = s.first_row[s.num_experts];
  const int num_h = rows * h_words(a), num_y = rows * static_cast<int>(a.moe.experts.hidden_size);
  const auto clear = [&](Word* words, int count) {
    const int end = few_cut(count / 2, blockIdx.x + 1, a.plan.num_ctas);
    for (int i = few_cut(count / 2, blockIdx.x, a.plan.num_ctas) + lane; i < end; i += 32)
      reinterpret_cast<ulonglong2*>(words)[i] = {0, 0};
  };
  uint64_t call = 0;
  if (lane == 0) call = ptx::load_acquire(&a.counters->arrivals) / a.plan.num_ctas;
  clear(a.h, num_h);
  clear(a.y, num_y);
  __syncwarp();
  if (lane == 0) {
    ptx::add_release(&a.counters->arrivals, 1);
    while (ptx::load_acquire(&a.counters->arrivals) < (call + 1) * a.plan.num_ctas) {
    }
    ptx::mbarrier_arrive(&s.cleared);
  }
  __syncwarp();
}

// The rows of h that this CTA's part of `down` reads -> shared memory, as they come. All threads.
__device__ inline void stage_h(const Args& a, const Shared& s, const Part& down, uint8_t* act) {
  if (down.first_strip == down.last_strip) return;
  const int first = s.first_row[down.first_strip / down.phase.strips];
  const int last = s.first_row[(down.last_strip - 1) / down.phase.strips + 1];
  const int row_bytes = down.phase.steps() * kFewRowStepBytes, pairs = row_bytes / 8;
  const int h_pairs = h_words(a) / 2;
  for (int i = threadIdx.x; i < (last - first) * pairs; i += kThreads) {
    const int row = i / pairs, pair = i % pairs;
    uint2 v = {0, 0};
    // 16 pairs of words are 64 columns.
    if (pair / 8 * 32 < static_cast<int>(a.moe.experts.intermediate_size)) {
      const Word* p = a.h + (static_cast<int64_t>(first + row) * h_pairs + pair) * 2;
      TwoWords w = load_words(p);
      while (!w.there()) w = load_words(p);
      v = {bf16x2_mul(static_cast<uint32_t>(w.a), kActFactor),
           bf16x2_mul(static_cast<uint32_t>(w.b), kActFactor)};
    }
    *reinterpret_cast<uint2*>(act + few_act_offset(row, row_bytes, pair * 2)) = v;
  }
}

// A warp's weights of both phases on their way into its ring: step by step, one group of copies each.
template <Fp4Format kFormat>
struct WeightStream {
  static constexpr int kTile = static_cast<int>(tile_bytes(kFormat));
  static constexpr int kScaleBytes = static_cast<int>(tile_scale_bytes(kFormat)) / 4;  // of a strip of a tile
  static constexpr int kScaleLanes = kScaleBytes / 16;

  const Args& a;
  const Routing& routing;
  int phase = 0;
  int at, end;    // of the phase's steps
  int steps = 0;  // left in the strip
  int half_at;    // of `steps`: where a step has one tile; -1: nowhere
  const uint8_t* codes;
  const uint8_t* scales;

  __device__ WeightStream(const Args& args, const Routing& r) : a(args), routing(r) {
    const Part part(a, routing.num_experts(), false, threadIdx.x / 32);
    at = part.begin, end = part.end;
  }

  // The next strip that has steps of this warp; whether there is one. The whole warp.
  __device__ bool next_strip() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (at == end) {
      if (phase == 1) return false;
      phase = 1;
      const Part part(a, routing.num_experts(), true, warp);
      at = part.begin, end = part.end;
      if (at == end) return false;
    }
    const Part part(a, routing.num_experts(), phase != 0, warp);
    const int per_strip = part.phase.steps(), k = at % per_strip;
    const int strip = part.first_strip + at / per_strip;
    steps = min(per_strip - k, end - at);
    at += steps;
    half_at = part.phase.k_tiles % 2 != 0 && k + steps == per_strip ? 1 : -1;
    const int expert = routing.expert(strip / part.phase.strips), in_expert = strip % part.phase.strips;
    const int64_t row_block = static_cast<int64_t>(expert) * (part.phase.strips / 4) + in_expert / 4;
    const uint8_t* tile = (phase == 0 ? a.moe.experts.gate_up : a.moe.experts.down) +
                          (row_block * part.phase.k_tiles + 2 * k) * kTile;
    codes = tile + in_expert % 4 * 512 + lane * 16;
    scales = tile + kTileCodeBytes + in_expert % 4 * kScaleBytes + lane % kScaleLanes * 16 +
             lane / kScaleLanes * kTile;
    return true;
  }

  // The next step -> slot, in shared memory, plus 16 times the lane; nothing after the last.
  __device__ __forceinline__ void issue(uint32_t slot) {
    const int lane = threadIdx.x % 32;
    if (steps > 0 || next_strip()) {
      const bool both = steps != half_at;
      ptx::cp_async16(slot, codes, 16);
      ptx::cp_async16(slot + 512, codes + kTile, both ? 16 : 0);
      if (lane < 2 * kScaleLanes) ptx::cp_async16(slot + 1024, scales, both || lane < kScaleLanes ? 16 : 0);
      codes += 2 * kTile;
      scales += 2 * kTile;
      --steps;
    }
    ptx::cp_async_commit();
  }
};

}  // namespace fp4moe::few
