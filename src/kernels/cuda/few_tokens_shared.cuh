// What the warps of few_tokens.cu share: sizes, arguments, shared memory, and a CTA's part of the work.
#pragma once

#include "kernels/cuda/few_tokens_plan.h"
#include "kernels/device_moe.h"

namespace fp4moe::few {

constexpr int kGroups = kFewGroups;
constexpr int kConsumerWarps = 4 * kGroups, kEpilogueWarps = kFewEpilogueWarps;
constexpr int kEpilogueThreads = kEpilogueWarps * 32;
constexpr int kProducerWarp = kConsumerWarps + kEpilogueWarps;
constexpr int kThreads = (kProducerWarp + 1) * 32;
constexpr int kProducerLanes = kFewProducerLanes;
constexpr int kFirstRounds = 2;  // of the weight stream, before the rows are counted

struct Args {
  DeviceMoeArgs moe;
  FewPlan plan;
  FewCounters* counters;
  uint8_t* h;    // [64 rows] in the order of B fragments: few_act_offset()
  float* y;      // [64 rows, H]: heads, times the tensor scale, with the bias
  float* parts;  // [num_ctas][8][64]: the sums of each CTA's first piece where it is not a head
};

struct Shared {
  uint64_t full[kFewMaxStages], empty[kFewMaxStages], part_full[2], part_empty[2], h_full;
  uint64_t call;                    // its number, from 1
  int num_experts;                  // U
  int expert[kFewMaxPairs];         // [U] active ones' local ids, in the order of their first slots
  uint32_t tokens[kFewMaxPairs];    // [U] bit t: token t goes there
  int first_row[kFewMaxPairs + 1];  // [U + 1] of h and y: a row for each token of an expert, ascending
  int token_of_row[kFewMaxPairs], row_of_slot[kFewMaxPairs];  // row -1: not local
  int expert_of_slot[kFewMaxPairs];                           // 0 ... U - 1
  float weight_of_slot[kFewMaxPairs];
  int pieces[kFewMaxPairs];  // [U] of the row block at hand: first CTA | last << 16
  bool is_last[kEpilogueThreads];
  alignas(16) float parts[2][kGroups][kFewMaxTokens * kFewPartStride];
};
constexpr int kSharedBytes = (static_cast<int>(sizeof(Shared)) + 127) / 128 * 128;

// A CTA's part of one phase.
struct Work {
  FewPhase phase;
  FewStripes stripes;
  int begin, end;

  __device__ Work(const Args& a, const Shared& s, bool down)
      : phase(down ? a.plan.down : a.plan.up),
        stripes(s.num_experts * phase.tiles(), a.plan.num_ctas),
        begin(stripes.begin(blockIdx.x)),
        end(stripes.begin(blockIdx.x + 1)) {}
  // Its row blocks [first_unit(), last_unit()), numbered through all experts.
  __device__ int first_unit() const { return begin / phase.k_tiles; }
  __device__ int last_unit() const {
    return begin == end ? first_unit() : (end + phase.k_tiles - 1) / phase.k_tiles;
  }
  __device__ int steps() const { return (end - begin + kFewStageTiles - 1) / kFewStageTiles; }
  __device__ int first_expert() const { return begin / phase.tiles(); }
  __device__ int last_expert() const { return (end - 1) / phase.tiles(); }
};

}  // namespace fp4moe::few
