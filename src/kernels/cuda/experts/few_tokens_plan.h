// How few_tokens.cu divides its work: plain arithmetic for host and device.
//
// A phase is one of the two GEMMs. Its work is cut into strips. A strip is 16 rows of an active expert's
// matrix with all columns; one m16n8k16 accumulator holds its sums. 4 strips share the tiles of a row block.
// Each CTA takes whole strips, so that no sum spans two CTAs; within a CTA, the strips' steps (of 2 k tiles)
// are cut evenly over the warps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/device_moe.h"

namespace fp4moe {

constexpr int kFewMaxTokens = 8;  // columns of the instruction's B operand
constexpr int kFewMaxPairs = 64;  // also the minimum number of CTAs: at most two experts per CTA
constexpr int kFewWarps = 15;     // warps per CTA that stream weights
constexpr int kFewStepTiles = 2;
constexpr int kFewRowStepBytes = kFewStepTiles * 128;  // of a step, per row of x or h
constexpr int kFewMaxDepth = 4;                        // steps in flight per warp, at most

// Counters of few_tokens.cu, in the second half of DeviceMoeArgs.counters.
constexpr int64_t kFewCountersOffset = kMoeCounterBytes / 2;
struct FewCounters {
  uint64_t arrivals;  // number of CTA arrivals in all calls so far
};

// A divisor that is known at launch, as a multiplication: a GPU's division takes about 100 cycles. Exact
// while dividend * (divisor - 1) < 2^32.
struct FewDivisor {
  uint32_t divisor = 1, inverse = 0;  // inverse: 2^32 / divisor, rounded up; 0 for the divisor 1

  constexpr FewDivisor() = default;
  constexpr explicit FewDivisor(int d)
      : divisor(static_cast<uint32_t>(d)),
        inverse(d == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor)) {}
  friend constexpr int operator/(int n, const FewDivisor& d) {
    const auto dividend = static_cast<uint32_t>(n);
    return static_cast<int>(d.inverse == 0 ? dividend : uint64_t{dividend} * d.inverse >> 32);
  }
};

// Start of part `part` of `total` items that are cut evenly into `parts` (an integer or a FewDivisor); a part
// ends where the next one starts.
constexpr int few_cut(int total, int part, int parts) {
  return static_cast<int>(static_cast<uint32_t>(total) * static_cast<uint32_t>(part) /
                          static_cast<uint32_t>(parts));
}
constexpr int few_cut(int total, int part, const FewDivisor& parts) { return total * part / parts; }

struct FewPhase {
  int strips = 0;  // in one expert's matrix
  int k_tiles = 0;
  FewDivisor by_strips, by_steps;

  constexpr FewPhase() = default;
  constexpr FewPhase(int num_strips, int num_k_tiles)
      : strips(num_strips), k_tiles(num_k_tiles), by_strips(num_strips), by_steps(steps()) {}
  constexpr int steps() const { return (k_tiles + kFewStepTiles - 1) / kFewStepTiles; }
  constexpr int row_words() const { return steps() * (kFewRowStepBytes / 4); }  // of a row of h in memory
};

struct FewPlan {
  FewPhase up, down;
  int num_ctas = 0;
  FewDivisor by_ctas;
  int depth = 0;      // of each warp's ring, in steps
  int act_bytes = 0;  // shared memory for x, then for h
};

// Bytes of a part of shared memory, in whole lines.
constexpr int few_padded(size_t bytes) { return (static_cast<int>(bytes) + 127) / 128 * 128; }

// Bytes of one step of a strip in shared memory: the codes of both tiles, then their scales.
constexpr int few_slot_bytes(Fp4Format format) {
  return few_padded(kFewStepTiles * static_cast<size_t>(tile_bytes(format)) / 4);
}

// Index of the word with columns c and c + 1 in a row of x or h, in the order in which the words are read
// as the B operand: k tiles of 32 words, each with two halves of 2 k steps, [4 q][step % 2][half of the
// step's 16 columns].
constexpr int few_act_word(int c) { return c / 64 * 32 + c / 32 % 2 * 16 + c % 8 / 2 * 4 + c / 8 % 4; }
// Like few_act_word(), for w4a8: slabs of 128 columns, [4 steps][4 q][4 words], in the order of the codes in
// w4a8's tiles.
constexpr int few_fp8_act_word(int c) {
  return c / 128 * 64 + c % 32 / 8 * 16 + c % 128 / 32 * 4 + c % 8 / 2;
}
// Byte offset of a word in shared memory, in which odd rows have their halves swapped to avoid bank
// conflicts.
constexpr int few_act_offset(int row, int row_bytes, int word) {
  return row * row_bytes + ((word * 4) ^ (row % 2 * 64));
}

constexpr FewPlan few_plan(const TiledExperts& e, int64_t num_tokens, int64_t topk, int num_ctas,
                           int shared_bytes) {
  FewPlan p;
  const auto h = static_cast<int>(e.hidden_size), i = static_cast<int>(e.intermediate_size);
  const int up_rows = is_gated(e.activation.kind) ? 2 * i : i;
  p.up = {4 * static_cast<int>(num_tiles(up_rows)), static_cast<int>(num_tiles(h))};
  p.down = {4 * static_cast<int>(num_tiles(h)), static_cast<int>(num_tiles(i))};
  p.num_ctas = num_ctas, p.by_ctas = FewDivisor(num_ctas);
  const int64_t h_rows = num_tokens * (topk < 2 ? topk : 2);
  const int64_t x_bytes = num_tokens * p.up.steps() * kFewRowStepBytes;
  const int64_t h_bytes = h_rows * p.down.steps() * kFewRowStepBytes;
  p.act_bytes = static_cast<int>(x_bytes > h_bytes ? x_bytes : h_bytes);
  p.depth = (shared_bytes - p.act_bytes) / (kFewWarps * few_slot_bytes(e.format));
  if (p.depth > kFewMaxDepth) p.depth = kFewMaxDepth;
  return p;
}

}  // namespace fp4moe
