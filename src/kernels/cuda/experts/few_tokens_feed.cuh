// How data reaches the warps of few_tokens.cu: the tables of rows, the copies of x and h in shared memory,
// and the stream of weights. Device code only.
#pragma once

#include "kernels/cuda/experts/few_tokens_shared.cuh"
#include "kernels/cuda/experts/fp4_dequant.cuh"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/ptx/ptx_order.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe::few {

// Fills Shared's tables of experts and rows. Called by the helper warp. weights: those of the lane's slots.
__device__ inline void find_rows(int token_slots, const Routing& routing, const float (&weights)[2],
                                 Shared& s) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 2; ++i) {
    const int slot = lane + 32 * i;
    s.weight_of_slot[slot] = weights[i];
    s.tokens[slot] = 0;
    if (routing.id[i] >= 0 && routing.first[i] == slot) s.expert[routing.rank(i)] = routing.id[i];
  }
  if (lane == 0) s.num_experts = routing.num_experts();
  __syncwarp();
  for (int i = 0; i < 2; ++i)
    if (routing.id[i] >= 0) atomicOr(&s.tokens[routing.rank(i)], 1u << ((lane + 32 * i) / token_slots));
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
    const int slot = lane + 32 * i, t = slot / token_slots, e = routing.rank(i);
    const int row = routing.id[i] < 0 ? -1 : s.first_row[e] + __popc(s.tokens[e] & ((1u << t) - 1));
    s.row_of_slot[slot] = row;
    if (row >= 0) s.token_of_row[row] = t;
  }
}

// Where a kernel's tokens are: in memory, complete when the kernel before has ended. few_tokens_lanes.cuh has
// another such type.
struct StoredInput {
  const bf16* x;

  __device__ explicit StoredInput(const Args& a) : x(a.moe.x) {}
  // Returns the ids, and for the helper warp the weights, of the lane's slots. Called by all threads.
  __device__ Slots slots(const Args& a, Shared&, bool is_helper) const { return {a, is_helper}; }
  // Loads eight columns of token t's row; await() then waits until they are complete.
  __device__ uint4 piece(const Args& a, int t, int col) const {
    return *reinterpret_cast<const uint4*>(x + static_cast<int64_t>(t) * a.moe.experts.hidden_size + col);
  }
  __device__ void await(const Args&, int, int, uint4&) const {}
  // Whether a wait for other CTAs goes on. Called by a thread for each poll, which it counts.
  __device__ bool goes_on(uint32_t&) const { return true; }
};

// w4a16: copies x to shared memory, multiplied by 2^64: decoded codes have a factor of 2^-126, which is too
// small for f32 sums. Columns past H are zeros. Called by all warps but the helper.
template <class Input>
__device__ inline void stage_x(const Args& a, const Input& input, uint8_t* act) {
  const int row_bytes = a.plan.up.steps() * kFewRowStepBytes, h = static_cast<int>(a.moe.experts.hidden_size);
  const int pieces = row_bytes / 16, total = pieces * static_cast<int>(a.moe.num_tokens);  // of 8 columns
  constexpr int kAtOnce = 4, kStep = kWarps * 32;
  for (int begin = threadIdx.x; begin < total; begin += kAtOnce * kStep) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int piece = begin + i * kStep, t = piece / pieces, col = (piece - t * pieces) * 8;
      v[i] = {0, 0, 0, 0};
      if (piece < total && col < h) v[i] = input.piece(a, t, col);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int piece = begin + i * kStep, t = piece / pieces, col = (piece - t * pieces) * 8;
      if (piece >= total) break;
      if (col < h) input.await(a, t, col, v[i]);
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
      uint8_t* at = act + few_act_offset(t, row_bytes, few_act_word(col));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint32_t*>(at + 16 * j) = bf16x2_mul(words[j], kActFactor);
    }
  }
}

// Words that other CTAs write and that may not be valid yet.
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

// Number of words in a row of h.
__device__ inline int h_words(const Args& a) { return a.plan.down.row_words(); }

// Clears this CTA's share of the first `rows` rows of h and y, waits until all CTAs have cleared theirs, and
// completes s.cleared. Called by the helper warp.
__device__ inline void clear_words(const Args& a, Shared& s, int rows) {
  const int lane = threadIdx.x % 32;
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

// The rows of h that a CTA's part of `down` reads.
struct RowsOfH {
  int first = 0, last = 0;
  __device__ RowsOfH(const Shared& s, const Part& down) {
    if (down.first_strip == down.last_strip) return;
    first = s.first_row[down.first_strip / down.phase.by_strips];
    last = s.first_row[(down.last_strip - 1) / down.phase.by_strips + 1];
  }
};

// w4a16: copies the rows of h (RowsOfH) to shared memory as they become valid. Called by all threads.
template <class Input>
__device__ inline void stage_h(const Args& a, const Shared& s, const Input& input, const Part& down,
                               uint8_t* act) {
  const auto [first, last] = RowsOfH(s, down);
  const int row_bytes = down.phase.steps() * kFewRowStepBytes, pairs = row_bytes / 8;
  const int h_pairs = h_words(a) / 2;
  for (int i = threadIdx.x; i < (last - first) * pairs; i += kThreads) {
    const int row = i / pairs, pair = i % pairs;
    uint2 v = {0, 0};
    // Every 8 pairs of words are 32 adjacent columns.
    if (pair / 8 * 32 < static_cast<int>(a.moe.experts.intermediate_size)) {
      const Word* p = a.h + (static_cast<int64_t>(first + row) * h_pairs + pair) * 2;
      TwoWords w = load_words(p);
      for (uint32_t polls = 0; !w.there() && input.goes_on(polls);) w = load_words(p);
      v = {bf16x2_mul(static_cast<uint32_t>(w.a), kActFactor),
           bf16x2_mul(static_cast<uint32_t>(w.b), kActFactor)};
    }
    *reinterpret_cast<uint2*>(act + few_act_offset(row, row_bytes, pair * 2)) = v;
  }
}

// Copies a warp's weights of both phases into its ring, one cp.async group per step. A step is two halves of
// 64 columns: two tiles, or the halves of a w4a8 tile. A run is a sequence of steps whose addresses differ
// only by multiples of `stride`. A warp copies its steps of `up`, then its steps of `down`, then zeros.
// Example: with 5 and 4 k tiles, the last step of a strip of `up` has only one half (h):
//
//   phase   up                            down
//   strip   4         5          6        0     1
//   step    1  h      0  1  h    0        1     0  1    zeros without end
//   runs    |--||--|  |----||--| |--|     |--|  |----|  |-----------------
template <class W>
struct WeightStream {
  static constexpr int kTile =
      static_cast<int>(W::kFp8 ? fp8_tile_bytes(W::kFormat) : tile_bytes(W::kFormat));
  static constexpr int kScaleBytes = kStripScaleBytes<W::kFormat>;  // per 64 columns
  static constexpr int kScaleLanes = kScaleBytes / kLaneBytes;

  const Args& a;
  const Routing& routing;
  bool down = false;
  int left = 0;           // steps of the phase after the current strip
  int rank, in_expert;    // of the current strip
  int steps = 0;          // left in the current run
  bool has_half = false;  // the run is followed by a step with one half
  // Which parts the run's steps contain; the other parts are filled with zeros. has_scales is for this lane
  // only.
  bool has_first = true, has_second = true, has_scales = true;
  const uint8_t* expert = nullptr;  // the current expert's tiles
  const uint8_t* codes = nullptr;   // address of the codes of the next step's first half
  uint32_t scales_from_codes = 0;   // offset of the scales from the codes, in bytes
  uint32_t stride = 0;              // bytes to the tile of the next columns

  __device__ WeightStream(const Args& args, const Routing& r) : a(args), routing(r) {}

  __device__ void find_expert() {
    const FewPhase& phase = down ? a.plan.down : a.plan.up;
    const int64_t matrix_bytes =
        W::kFp8 ? (down ? a.fp8_down : a.fp8_up).bytes : int64_t{phase.strips / 4 * phase.k_tiles} * kTile;
    expert = (down ? a.moe.experts.down : a.moe.experts.gate_up) + routing.expert(rank) * matrix_bytes;
  }
  // Starts the current strip at step k.
  __device__ void begin_strip(int k) {
    const FewPhase& phase = down ? a.plan.down : a.plan.up;
    const int lane = threadIdx.x % 32;
    steps = min(phase.steps() - k, left);
    left -= steps;
    has_half = phase.k_tiles % 2 != 0 && k + steps == phase.steps();
    const int row_tiles = phase.strips / 4, row_tile = in_expert / 4;
    stride = static_cast<uint32_t>(tile_group_size(row_tiles, row_tile)) * kTile;
    const int64_t index = W::kFp8 ? tile_index(row_tiles, phase.steps(), row_tile, k)
                                  : tile_index(row_tiles, phase.k_tiles, row_tile, 2 * k);
    codes = expert + index * kTile + in_expert % 4 * kStripCodeBytes + lane * kLaneBytes;
    // A tile's memory: codes of its 4 strips, then their scales. In w4a8 the lanes fetch both halves' scales
    // from there; in w4a16 the lanes from kScaleLanes on fetch the scales of the tile with the next columns.
    if constexpr (W::kFp8)
      scales_from_codes =
          static_cast<uint32_t>(kFp8CodeBytes) - in_expert % 4 * (kStripCodeBytes - 2 * kScaleBytes);
    else
      scales_from_codes = kTileCodeBytes - in_expert % 4 * (kStripCodeBytes - kScaleBytes) -
                          lane * kLaneBytes + lane % kScaleLanes * kLaneBytes + lane / kScaleLanes * stride;
    has_second = has_scales = true;
    if (has_half && --steps == 0) begin_half();
  }
  // Starts the strip's last step, which has one half.
  __device__ void begin_half() {
    has_half = false;
    steps = 1;
    has_second = false;
    has_scales = W::kFp8 || threadIdx.x % 32 < kScaleLanes;
  }
  // Starts this warp's first strip of the phase.
  __device__ void begin_phase() {
    const Part part(a, routing.num_experts(), down, threadIdx.x / 32);
    left = part.end - part.begin;
    if (left == 0) return;
    const int strip = part.begin / part.phase.by_steps, k = part.begin - strip * part.phase.steps();
    rank = (part.first_strip + strip) / part.phase.by_strips;
    in_expert = part.first_strip + strip - rank * part.phase.strips;
    find_expert();
    begin_strip(k);
  }
  // Starts the next strip of the same expert, or the next expert's first strip after an expert's last one.
  __device__ void begin_next_strip() {
    if (++in_expert == (down ? a.plan.down : a.plan.up).strips) {
      in_expert = 0;
      ++rank;
      find_expert();
    }
    begin_strip(0);
  }
  __device__ void begin_zeros() {
    steps = 1 << 30;
    has_first = has_second = has_scales = false;
  }
  // Starts the next run of steps; called by the whole warp.
  //
  //   has_half  left  down    next run
  //   true      any   any     the strip's last step, which has one half
  //   false     > 0   any     the next strip
  //   false     0     false   the warp's first strip of `down`, or zeros if it has no strip there
  //   false     0     true    zeros
  __device__ void next_run() {
    if (has_half) return begin_half();
    if (left > 0) return begin_next_strip();
    if (!down) {
      down = true;
      begin_phase();
    }
    if (steps == 0) begin_zeros();
  }

  // Copies the run's next step to `slot`, a shared address plus 16 times the lane.
  __device__ __forceinline__ void issue(uint32_t slot) {
    const uint8_t* scales = codes + scales_from_codes;
    ptx::cp_async16_once(slot, codes, has_first ? 16 : 0);
    if constexpr (!W::kFp8) codes += stride;
    ptx::cp_async16_once(slot + kStripCodeBytes, codes + (W::kFp8 ? kFp8HalfCodeBytes : 0),
                         has_second ? 16 : 0);
    codes += stride;
    if (threadIdx.x % 32 < 2 * kScaleLanes)
      ptx::cp_async16_once(slot + kStepCodeBytes, scales, has_scales ? 16 : 0);
    ptx::cp_async_commit();
  }
};

}  // namespace fp4moe::few
