// Data shared by the warps of few_tokens.cu: arguments, shared memory, the active experts. Device code only.
#pragma once

#include "kernels/cuda/experts/few_tokens_plan.h"
#include "kernels/cuda/ptx/kernel_mark.cuh"
#include "kernels/device_comm.h"
#include "kernels/device_moe.h"

namespace fp4moe::few {

constexpr int kWarps = kFewWarps, kHelperWarp = kWarps;
constexpr int kThreads = (kWarps + 1) * 32;

// Factor by which x and h in shared memory are multiplied (2^64 as a pair of bf16), and its inverse for the
// sums.
constexpr uint32_t kActFactor = 0x5f805f80;
constexpr float kSumFactor = 0x1p-64f;

// A 32-bit value in the lower half, valid once the upper half is not 0.
using Word = unsigned long long;
constexpr Word kThere = 1ull << 32;

// The weights of a layer: tiles of w4a16 (tile_layout.h), or of w4a8 (fp8_tile_layout.h). A step of a strip
// takes the same number of bytes in both.
template <Fp4Format kFormatT, bool kFp8T>
struct Weights {
  static constexpr Fp4Format kFormat = kFormatT;
  static constexpr bool kFp8 = kFp8T;
};

// A step of a strip in a warp's ring: codes [2 tiles][32 lanes][16 bytes], then scales [2 tiles][bytes].
constexpr int kLaneBytes = 16, kStripCodeBytes = 32 * kLaneBytes;  // of one tile
constexpr int kStepCodeBytes = kFewStepTiles * kStripCodeBytes;
template <Fp4Format kFormat>
constexpr int kStripScaleBytes = static_cast<int>(tile_scale_bytes(kFormat)) / 4;  // of one tile

// Layout of each expert's matrix in FP8 tiles.
struct Fp8Matrix {
  int64_t bytes = 0, factors_offset = 0;
};

struct Args {
  DeviceMoeArgs moe;
  FewPlan plan;
  int token_slots;  // of a token: topk, and one for the shared expert
  Fp8Matrix fp8_up, fp8_down;
  FewCounters* counters;
  Word* h;  // [64 rows][words of a row]: pairs of bf16 at few_act_word() (w4a8: few_fp8_act_word())
  Word* y;  // [64 rows][H]: f32, multiplied by the tensor scale, plus the bias
  PartialPeers peers;  // of moe.out
  KernelMark mark;
};

struct Shared {
  uint64_t cleared;                 // barrier: completes when all CTAs have cleared h and y
  int num_experts;                  // U
  int expert[kFewMaxPairs];         // [U] local ids of the active experts, in the order of their first slots
  uint32_t tokens[kFewMaxPairs];    // [U] bit t: token t uses the expert
  int first_row[kFewMaxPairs + 1];  // [U + 1] in h and y: one row for each token of an expert, ascending
  int token_of_row[kFewMaxPairs], row_of_slot[kFewMaxPairs];  // row_of_slot -1: not local
  float weight_of_slot[kFewMaxPairs];
  float4 pieces[kWarps][32];  // a warp's sums for a strip whose first step belongs to another warp
};
// Follows Shared in memory, for w4a8.
struct Fp8Shared {
  uint2 table[128];                           // the e4m3 bytes of the eight magnitudes, for each scale index
  float most[kWarps + 1][2 * kFewMaxTokens];  // max |x| of each row, per warp
  float x_scales[kFewMaxTokens], h_scales[2 * kFewMaxTokens];  // of the rows in shared memory
};
constexpr int shared_bytes(bool fp8) {
  return few_padded(sizeof(Shared)) + (fp8 ? few_padded(sizeof(Fp8Shared)) : 0);
}
__device__ __forceinline__ Fp8Shared& fp8_of(const Shared& s) {
  auto* memory = reinterpret_cast<uint8_t*>(const_cast<Shared*>(&s));
  return *reinterpret_cast<Fp8Shared*>(memory + few_padded(sizeof(Shared)));
}

// Ids and weights of the lane's slots, loaded early, before any code needs them.
struct Slots {
  int32_t id[2];
  float weight[2];
  bool is_shared[2];  // the last of a token's slots, if there is a shared expert

  Slots() = default;
  __device__ Slots(const Args& a, bool needs_weights) {
    const DeviceMoeArgs& m = a.moe;
    const int topk = static_cast<int>(m.topk);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = threadIdx.x % 32 + 32 * i, t = slot / a.token_slots, k = slot - t * a.token_slots;
      const bool is_routed = t < m.num_tokens && k < topk;
      is_shared[i] = t < m.num_tokens && k == topk;
      id[i] = is_routed && m.ids != nullptr ? m.ids[t * topk + k] : static_cast<int32_t>(m.first_expert);
      weight[i] = needs_weights && is_routed && m.weights != nullptr ? m.weights[t * topk + k] : 1;
    }
  }
};

// The active experts, held in the registers of a warp: lane l has slots l and l + 32.
struct Routing {
  int id[2];          // local, or -1
  int first[2];       // the first slot with the same id
  uint32_t leads[2];  // lanes whose slot is the first one of its expert

  __device__ Routing(const Args& a, const Slots& slots) {
    const DeviceMoeArgs& m = a.moe;
    const int lane = threadIdx.x % 32, n = static_cast<int>(m.num_tokens) * a.token_slots;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t local = lane + 32 * i >= n ? -1 : slots.id[i] - m.first_expert;
      id[i] = local >= 0 && local < m.experts.num_experts ? static_cast<int>(local) : -1;
      if (slots.is_shared[i])  // a bf16 one is not an FP4 expert (few_tokens_dense.cuh)
        id[i] = m.shared.gate_up == nullptr ? static_cast<int>(m.experts.num_experts) : -1;
    }
    first[0] = __ffs(static_cast<int>(__match_any_sync(~0u, id[0]))) - 1;
    first[1] = lane + 32;
    if (n > 32) {
      first[1] = __ffs(static_cast<int>(__match_any_sync(~0u, id[1]))) + 31;
#pragma unroll 8
      for (int j = 31; j >= 0; --j)
        if (__shfl_sync(~0u, id[0], j) == id[1]) first[1] = j;
    }
    leads[0] = __ballot_sync(~0u, id[0] >= 0 && first[0] == lane);
    leads[1] = __ballot_sync(~0u, id[1] >= 0 && first[1] == lane + 32);
  }

  __device__ int num_experts() const { return __popc(leads[0]) + __popc(leads[1]); }
  // Returns the index, among the active experts, of the expert in the lane's slot i.
  __device__ int rank(int i) const {
    const int lead = first[i];
    return lead < 32 ? __popc(leads[0] & ((1u << lead) - 1))
                     : __popc(leads[0]) + __popc(leads[1] & ((1u << (lead - 32)) - 1));
  }
  // Returns the local id of active expert `rank`. Called by the whole warp.
  __device__ int expert(int rank) const {
    const int low = __popc(leads[0]), lane = threadIdx.x % 32;
    const bool is_high = rank >= low;
    const uint32_t lanes = is_high ? leads[1] : leads[0];
    const bool is_it =
        (lanes >> lane & 1) != 0 && __popc(lanes & ((1u << lane) - 1)) == rank - (is_high ? low : 0);
    const int source = __ffs(static_cast<int>(__ballot_sync(~0u, is_it))) - 1;
    return __shfl_sync(~0u, is_high ? id[1] : id[0], source);
  }
};

// A warp's part of a phase: steps [begin, end) of the CTA's strips.
struct Part {
  FewPhase phase;
  int first_strip, last_strip;  // of the CTA, numbered through all active experts
  int begin, end;

  __device__ Part(const Args& a, int num_experts, bool down, int warp)
      : phase(down ? a.plan.down : a.plan.up),
        first_strip(few_cut(num_experts * phase.strips, blockIdx.x, a.plan.by_ctas)),
        last_strip(few_cut(num_experts * phase.strips, blockIdx.x + 1, a.plan.by_ctas)),
        begin(start(warp)),
        end(start(warp + 1)) {}
  // Returns the index of a warp's first step.
  __device__ int start(int warp) const {
    return few_cut((last_strip - first_strip) * phase.steps(), warp, kWarps);
  }
};

}  // namespace fp4moe::few
