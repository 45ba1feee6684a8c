// How a warp of few_tokens.cu computes its steps: weights from its ring times x or h. Device code only.
//
// If an expert has one or two tokens, the scales of blocks of weights multiply the sums of the blocks'
// products instead of the weights. Each column pair of the tensor cores' B operand then has the tokens'
// values for one of 4 consecutive blocks (of 32 or 16 columns of the matrix) and zeros for the other blocks:
//
//   columns of B   0 1      2 3      4 5      6 7
//   block 0        tokens   0        0        0
//   block 1        0        tokens   0        0
//   block 2        0        0        tokens   0
//   block 3        0        0        0        tokens
//
// One accumulator thus holds the sums of 4 blocks side by side, and a lane needs one scale for each of its
// two rows.
#pragma once

#include "kernels/cuda/experts/few_tokens_feed.cuh"
#include "kernels/cuda/experts/few_tokens_finish.cuh"
#include "kernels/cuda/experts/fp4_dequant.cuh"
#include "kernels/cuda/experts/fp4_to_fp8.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"

namespace fp4moe::few {

// A warp's ring of steps: [2 tiles][32 lanes] codes, then scales.
template <class W, int kDepth>
struct Ring {
  static constexpr Fp4Format kFormat = W::kFormat;
  static constexpr int kSlot = few_slot_bytes(kFormat);
  uint32_t first, slot;  // shared addresses, plus 16 times the lane
  WeightStream<W> stream;

  __device__ Ring(const Args& a, const Routing& routing, const uint8_t* rings)
      : first(ptx::shared_address(rings) + threadIdx.x / 32 * (kDepth * kSlot) +
              threadIdx.x % 32 * kLaneBytes),
        slot(first),
        stream(a, routing) {}

  __device__ void prefill() {
    stream.begin_phase();
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) {
      if (stream.steps == 0) stream.next_run();
      stream.issue(first + i * kSlot);
      --stream.steps;
    }
  }

  // Waits until the next step's weights have landed.
  __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<kDepth - 1>();
    __syncwarp();
  }
  // Frees the slot of the step that has been read, and fetches the step kDepth later into that slot.
  __device__ __forceinline__ void next() {
    __syncwarp();
    stream.issue(slot);
    slot = slot == first + (kDepth - 1) * kSlot ? first : slot + kSlot;
  }
};

// Returns the scales of rows g and g + 8 of a block as f32. bytes: the block's two scale bytes in memory. The
// upper half of each f32 has the bf16 bits of tile_layout.h.
template <Fp4Format kFormat>
__device__ __forceinline__ float2 block_scales(uint32_t bytes) {
  if constexpr (kFormat == Fp4Format::kMxfp4)
    return {__uint_as_float(bytes << 23 & 0x7f800000), __uint_as_float(bytes << 15 & 0x7f800000)};
  return {__uint_as_float((bytes & 0xff) * (1 << 20) + 0x72800000),
          __uint_as_float((bytes >> 8) * (1 << 20) + 0x72800000)};
}

__device__ __forceinline__ void add_scaled(const float (&blocks)[4], float2 scales, float (&sum)[4]) {
  sum[0] = fmaf(blocks[0], scales.x, sum[0]);
  sum[1] = fmaf(blocks[1], scales.x, sum[1]);
  sum[2] = fmaf(blocks[2], scales.y, sum[2]);
  sum[3] = fmaf(blocks[3], scales.y, sum[3]);
}

// Returns the B words for the lane's column pair: with MXFP4 those of one block's two k steps, with NVFP4
// those of one k step in both tiles.
template <Fp4Format kFormat>
__device__ __forceinline__ uint4 load_b_words(uint32_t b_at) {
  if constexpr (kFormat == Fp4Format::kMxfp4) return ptx::load_shared16(b_at);
  const uint2 low = ptx::load_shared8(b_at), high = ptx::load_shared8(b_at + kFewRowStepBytes / 2);
  return {low.x, low.y, high.x, high.y};
}

// Multiplies `steps` steps of one run of the stream, in a strip whose expert has one or two tokens.
// add_lanes() must then add up the lanes' blocks. The blocks of a step, with j as in the table at the top of
// this file:
//
//   tile t               0           1                    0           1
//   k step k             0  1  2  3  0  1  2  3           0  1  2  3  0  1  2  3
//   MXFP4: block j       0     1     2     3     NVFP4:   0  1  2  3  0  1  2  3
//   words of b[j]        xy zw xy zw xy zw xy zw          xy xy xy xy zw zw zw zw
//   sums are scaled                            ^                    ^           ^
//
// b_at includes the offset of block g / 2, the block of the lane's column pair; the words there are loaded
// into b[g / 2], and the lane's other b[j] stay zero. The lane's sums are those of block q.
template <class RingT>
__device__ __forceinline__ void add_pairs_of_columns(RingT& ring, uint32_t b_at, bool has_b, int steps,
                                                     float (&sum)[4]) {
  constexpr bool kMx = RingT::kFormat == Fp4Format::kMxfp4;
  constexpr int kTileScales = kStripScaleBytes<RingT::kFormat>;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  // Offset of block q's scales from the lane's codes.
  const int scales_at =
      kStepCodeBytes - lane * kLaneBytes + (kMx ? q / 2 * kTileScales + g * 4 + q % 2 * 2 : g * 8 + q * 2);
  bool mine[4];
  for (int j = 0; j < 4; ++j) mine[j] = has_b && g / 2 == j;
  uint4 b[4] = {};
#pragma unroll 1
  for (int i = 0; i < steps; ++i, b_at += kFewRowStepBytes) {
    ring.wait();
    const uint4 codes[2] = {ptx::load_shared16(ring.slot), ptx::load_shared16(ring.slot + kStripCodeBytes)};
    uint32_t scales[2];  // MXFP4 uses only the first
    scales[0] = ptx::load_shared2(ring.slot + scales_at);
    if (!kMx) scales[1] = ptx::load_shared2(ring.slot + scales_at + kTileScales);
    ring.next();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (mine[j]) b[j] = load_b_words<RingT::kFormat>(b_at);
    float blocks[4] = {};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t words[4] = {codes[t].x, codes[t].y, codes[t].z, codes[t].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t w[4];
        decode_codes(words[k & ~1], words[k | 1], k % 2, w);
        const uint4& v = b[kMx ? 2 * t + k / 2 : k];
        const bool is_zw = kMx ? k % 2 != 0 : t != 0;
        ptx::mma_bf16(blocks, w, is_zw ? v.z : v.x, is_zw ? v.w : v.y);
      }
      if (kMx && t == 0) continue;
      add_scaled(blocks, block_scales<RingT::kFormat>(scales[kMx ? 0 : t]), sum);
      for (float& block : blocks) block = 0;
    }
  }
}
__device__ __forceinline__ void add_lanes(float (&sum)[4]) {
  for (float& s : sum) {
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
  }
}

// Like add_pairs_of_columns(), but for up to 8 tokens; add_lanes() is not needed.
template <class RingT>
__device__ __forceinline__ void add_columns(RingT& ring, uint32_t b_at, int swap, int steps,
                                            float (&sum)[4]) {
  constexpr int kTileScales = kStripScaleBytes<RingT::kFormat>;
  const int lane = threadIdx.x % 32;
  const int scales_at = kStepCodeBytes - lane * kLaneBytes + lane / 4 * (kTileScales / 8);
  float second[4] = {};  // the second tile's sums
#pragma unroll 1
  for (int i = 0; i < steps; ++i, b_at += kFewRowStepBytes) {
    ring.wait();
    TileWords<RingT::kFormat> words[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      words[t].codes = ptx::load_shared16(ring.slot + t * kStripCodeBytes);
      if constexpr (RingT::kFormat == Fp4Format::kMxfp4) {
        words[t].scales[0] = ptx::load_shared4(ring.slot + scales_at + t * kTileScales);
      } else {
        const uint2 both = ptx::load_shared8(ring.slot + scales_at + t * kTileScales);
        words[t].scales[0] = both.x, words[t].scales[1] = both.y;
      }
    }
    ring.next();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint4 low = ptx::load_shared16(b_at + t * 128), high = ptx::load_shared16(b_at + swap + t * 128);
      float(&to)[4] = t == 0 ? sum : second;
      uint32_t w[4];
      words[t].decode(0, w);
      ptx::mma_bf16(to, w, low.x, low.y);
      words[t].decode(1, w);
      ptx::mma_bf16(to, w, low.z, low.w);
      words[t].decode(2, w);
      ptx::mma_bf16(to, w, high.x, high.y);
      words[t].decode(3, w);
      ptx::mma_bf16(to, w, high.z, high.w);
    }
  }
  for (int i = 0; i < 4; ++i) sum[i] += second[i];
}

// Like add_columns(), but for w4a8 and 1 to 8 tokens: the table in which codes are looked up includes their
// scale.
template <class RingT>
__device__ __forceinline__ void add_fp8_columns(RingT& ring, const uint2* table, uint32_t b_at, int swap,
                                                int steps, float (&sum)[4]) {
  using Words = Fp8TileWords<RingT::kFormat>;
  const int lane = threadIdx.x % 32, q = lane % 4;
  const int codes_at = q / 2 * kStripCodeBytes + fp8_piece(lane / 4, q) * kLaneBytes - lane * kLaneBytes;
  const int scales_at = kStepCodeBytes - lane * kLaneBytes + lane * 2 * Words::kScales;
  float second[4] = {};  // sums of the odd steps of the tensor cores
#pragma unroll 1
  for (int i = 0; i < steps; ++i, b_at += kFewRowStepBytes) {
    ring.wait();
    Words words;
    words.codes[0] = ptx::load_shared16(ring.slot + codes_at);
    words.codes[1] = ptx::load_shared16(ring.slot + codes_at + 256);
    words.find_tables(table, Words::kScales == 1 ? ptx::load_shared2(ring.slot + scales_at)
                                                 : ptx::load_shared4(ring.slot + scales_at));
    ring.next();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 b = ptx::load_shared16(b_at + step / 2 * 128 + step % 2 * swap);
      uint32_t w[2][4];
      words.make_f16(step, w);
      ptx::mma_f16(sum, w[0], b.x, b.y);
      ptx::mma_f16(second, w[1], b.z, b.w);
    }
  }
  for (int i = 0; i < 4; ++i) sum[i] += second[i];
}

// Adds the products of a strip's next `steps` steps to sum.
template <class W, int kDepth>
__device__ __forceinline__ void add_steps(const Shared& s, Ring<W, kDepth>& ring, const Strip<W>& strip,
                                          int first, int steps, float (&sum)[4]) {
  const bool is_pair = !W::kFp8 && strip.columns <= 2;
  uint32_t b_at = (is_pair ? strip.pairs_b : strip.b) + first * kFewRowStepBytes;
#pragma unroll 1
  while (steps > 0) {
    if (ring.stream.steps == 0) ring.stream.next_run();
    const int run = min(steps, ring.stream.steps);
    if constexpr (W::kFp8)
      add_fp8_columns(ring, fp8_of(s).table, b_at, strip.swap, run, sum);
    else if (is_pair)
      add_pairs_of_columns(ring, b_at, strip.has_pairs_b, run, sum);
    else
      add_columns(ring, b_at, strip.swap, run, sum);
    ring.stream.steps -= run;
    steps -= run;
    b_at += run * kFewRowStepBytes;
  }
  if (is_pair) add_lanes(sum);
}

}  // namespace fp4moe::few
