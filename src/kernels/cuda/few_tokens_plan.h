// Who does what in few_tokens.cu: plain arithmetic for host and device.
//
// A phase's work is the tiles of all active experts' matrices in a row, [expert][row block][k tile], as they
// lie in memory but for the jumps between experts. Each CTA takes one stretch of it (a stripe), equal to a
// tile. The sum of a row block that is cut by stripes' ends is made of pieces: the head, which begins at k
// tile 0, and the first pieces of the CTAs behind.
#pragma once

#include <cstdint>

#include "kernels/cuda/tile_layout.h"
#include "kernels/device_moe.h"

namespace fp4moe {

constexpr int kFewMaxTokens = 8, kFewMaxPairs = 64;
constexpr int kFewMaxCtas = 160;
constexpr int kFewStageTiles = 2;     // of a step of the weight stream, for one group of warps
constexpr int kFewGroups = 6;         // of consumer warps; group g has steps g, g + 6, ...
constexpr int kFewProducerLanes = 4;  // lane l issues steps l, l + 4, ...
// A stage is always filled by the same lane and emptied by the same group: whoever waits for a stage has
// itself done the lap before, so that a barrier's parity tells the laps apart.
constexpr int kFewStageStep = 12;
static_assert(kFewStageStep % kFewGroups == 0 && kFewStageStep % kFewProducerLanes == 0);
constexpr int kFewMaxStages = 48;
constexpr int kFewMinStages = kFewStageStep;
constexpr int kFewPartStride = 68;       // floats from one token's 64 sums to the next: no bank conflicts
constexpr int kFewTileBytesOfRow = 128;  // 64 bf16 of a row, in the order of B fragments

// Counters of few_tokens.cu: the second half of DeviceMoeArgs.counters.
constexpr int64_t kFewCountersOffset = kMoeCounterBytes / 2;
constexpr int kFewEpilogueWarps = 4;
struct FewCounters {
  uint64_t arrivals;                                // at the grid barrier, of all calls so far
  uint64_t reserved;                                //
  uint32_t flags[kFewMaxCtas * kFewEpilogueWarps];  // the call whose first piece is published
  // Tiles of each of down's row blocks that are done, of all experts.
  uint32_t blocks[(kMoeCounterBytes - kFewCountersOffset) / 4 - 4 - kFewMaxCtas * kFewEpilogueWarps];
};
static_assert(sizeof(FewCounters) == kMoeCounterBytes - kFewCountersOffset);

// One of the two GEMMs.
struct FewPhase {
  int row_blocks = 0;  // of one expert's matrix
  int k_tiles = 0;

  constexpr int tiles() const { return row_blocks * k_tiles; }
};

// How `total` tiles are cut over CTAs; none is empty but for those behind number `total`. Precondition:
// (total + 1) * num_ctas < 2^32.
struct FewStripes {
  uint32_t total, num_ctas;

  constexpr FewStripes(int tiles, int most_ctas)
      : total(static_cast<uint32_t>(tiles)),
        num_ctas(static_cast<uint32_t>(tiles < most_ctas ? tiles : most_ctas)) {}
  constexpr int begin(int cta) const {
    const auto c = static_cast<uint32_t>(cta);
    return static_cast<int>(c < num_ctas ? c * total / num_ctas : total);
  }
  // The CTA that has tile `tile`.
  constexpr int owner(int tile) const {
    return static_cast<int>(((static_cast<uint32_t>(tile) + 1) * num_ctas - 1) / total);
  }
};

struct FewPlan {
  FewPhase up, down;
  int num_ctas = 0;
  int act_bytes = 0;  // of shared memory: x, then h
  int num_stages = 0;
  int stage_bytes = 0;
};

// Byte offset of column c in row r of x or h as the B operand reads it: k tiles of 128 bytes, in each two
// halves of 2 k steps (swapped in odd rows, against bank conflicts), [4 q][step % 2][8 columns' half][2].
constexpr int few_act_offset(int row, int row_bytes, int c) {
  return row * row_bytes + c / 64 * kFewTileBytesOfRow + ((c / 32 % 2) ^ (row % 2)) * 64 + c % 8 / 2 * 16 +
         c / 8 % 4 * 4 + c % 2 * 2;
}

constexpr FewPlan few_plan(const TiledExperts& e, int64_t num_tokens, int64_t topk, int num_ctas,
                           int shared_bytes) {
  FewPlan p;
  const auto h = static_cast<int>(e.hidden_size), i = static_cast<int>(e.intermediate_size);
  p.up = {static_cast<int>(num_tiles(is_gated(e.activation.kind) ? 2 * i : i)),
          static_cast<int>(num_tiles(h))};
  p.down = {static_cast<int>(num_tiles(h)), static_cast<int>(num_tiles(i))};
  p.num_ctas = num_ctas;
  // A CTA's stripe of `down` touches two experts at most: there are no more of them than CTAs.
  const int64_t rows = num_tokens * topk < 2 * num_tokens ? num_tokens * topk : 2 * num_tokens;
  const int64_t x_bytes = num_tokens * p.up.k_tiles * kFewTileBytesOfRow;
  const int64_t h_bytes = rows * p.down.k_tiles * kFewTileBytesOfRow;
  p.act_bytes = static_cast<int>(x_bytes > h_bytes ? x_bytes : h_bytes);
  p.stage_bytes = kFewStageTiles * static_cast<int>(tile_bytes(e.format));
  p.num_stages = (shared_bytes - p.act_bytes) / p.stage_bytes;
  if (p.num_stages > kFewMaxStages) p.num_stages = kFewMaxStages;
  p.num_stages -= p.num_stages % kFewStageStep;
  return p;
}

}  // namespace fp4moe
