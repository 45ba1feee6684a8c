// What few_tokens.cu does first: who goes where, x into shared memory, the stream of weights. Device code
// only.
#pragma once

#include "kernels/cuda/few_tokens_shared.cuh"
#include "kernels/cuda/ptx_sm90.cuh"

namespace fp4moe::few {

// One warp: the active experts and which of them each slot takes.
__device__ inline void find_experts(const DeviceMoeArgs& m, Shared& s, int lane) {
  const int n = static_cast<int>(m.num_tokens * m.topk);
  int id[2], leader[2];
  for (int i = 0; i < 2; ++i) {
    const int slot = leader[i] = lane + 32 * i;
    const int64_t local = slot >= n ? -1 : m.ids != nullptr ? m.ids[slot] - m.first_expert : 0;
    id[i] = local >= 0 && local < m.experts.num_experts ? static_cast<int>(local) : -1;
    s.expert_of_slot[slot] = id[i];
    s.weight_of_slot[slot] = slot < n && m.weights != nullptr ? m.weights[slot] : 1;
  }
  __syncwarp();
#pragma unroll 8
  for (int j = n - 1; j >= 0; --j) {
    const int other = s.expert_of_slot[j];
    if (other == id[0] && j < leader[0]) leader[0] = j;
    if (other == id[1] && j < leader[1]) leader[1] = j;
  }
  const uint32_t low = __ballot_sync(~0u, id[0] >= 0 && leader[0] == lane);
  const uint32_t high = __ballot_sync(~0u, id[1] >= 0 && leader[1] == lane + 32);
  for (int i = 0; i < 2; ++i) {
    const int l = leader[i];
    const int rank =
        l < 32 ? __popc(low & ((1u << l) - 1)) : __popc(low) + __popc(high & ((1u << (l - 32)) - 1));
    s.expert_of_slot[lane + 32 * i] = id[i] >= 0 ? rank : -1;
    if (id[i] >= 0 && l == lane + 32 * i) {
      s.expert[rank] = id[i];
      s.tokens[rank] = 0;
    }
  }
  if (lane == 0) s.num_experts = __popc(low) + __popc(high);
  __syncwarp();
}

// The same warp: rows of the active experts' tokens.
__device__ inline void find_rows(const DeviceMoeArgs& m, Shared& s, int lane) {
  const int topk = static_cast<int>(m.topk);
  for (int i = 0; i < 2; ++i) {
    const int slot = lane + 32 * i, e = s.expert_of_slot[slot];
    if (e >= 0) atomicOr(&s.tokens[e], 1u << (slot / topk));
  }
  __syncwarp();
  int before = 0;
  for (int i = 0; i < 2; ++i) {
    const int e = lane + 32 * i;
    int rows = e < s.num_experts ? __popc(s.tokens[e]) : 0;
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
    const int slot = lane + 32 * i, e = s.expert_of_slot[slot], t = slot / topk;
    const int row = e < 0 ? -1 : s.first_row[e] + __popc(s.tokens[e] & ((1u << t) - 1));
    s.row_of_slot[slot] = row;
    if (row >= 0) s.token_of_row[row] = t;
  }
}

// x -> shared memory in the order of B fragments, zeros past H.
__device__ inline void stage_x(const Args& a, uint8_t* act) {
  const int row_words = a.plan.up.k_tiles * kFewTileBytesOfRow / 16,
            h = static_cast<int>(a.moe.experts.hidden_size);
  const auto* x = reinterpret_cast<const uint32_t*>(a.moe.x);
  for (int i = threadIdx.x; i < row_words * static_cast<int>(a.moe.num_tokens); i += kProducerWarp * 32) {
    const int t = i / row_words, word = i % row_words;
    const int col = word / 4 * 32 + word % 4 * 2;  // of 4 columns' pairs, 8 columns apart
    uint4 v = {0, 0, 0, 0};
    if (col < h) {
      const uint32_t* pair = x + (static_cast<int64_t>(t) * h + col) / 2;
      v = {pair[0], pair[4], pair[8], pair[12]};
    }
    *reinterpret_cast<uint4*>(act + few_act_offset(t, row_words * 16, col)) = v;
  }
}

__device__ inline void init_barriers(Shared& s) {
  for (int i = 0; i < kFewMaxStages; ++i) {
    ptx::mbarrier_init(&s.full[i], 1);
    ptx::mbarrier_init(&s.empty[i], 4);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(&s.part_full[i], kConsumerWarps);
    ptx::mbarrier_init(&s.part_empty[i], kEpilogueWarps);
  }
  ptx::mbarrier_init(&s.h_full, 1);
  ptx::mbarrier_init_fence();
}

// The first lanes of the producer warp: step by step this CTA's tiles of both phases, a step of
// kFewStageTiles in a stage; lane l has every kProducerLanes-th step, from l on.
template <Fp4Format kFormat>
struct WeightStream {
  static constexpr int kBytes = static_cast<int>(tile_bytes(kFormat));

  const Args& a;
  Shared& s;
  uint8_t* ring;
  Work up, down;
  int step, stage;
  uint32_t lap = 0;

  __device__ WeightStream(const Args& args, Shared& shared, uint8_t* memory, int lane)
      : a(args),
        s(shared),
        ring(memory),
        up(args, shared, false),
        down(args, shared, true),
        step(lane),
        stage(lane) {}

  // Tiles [first, first + count) of a phase: of one expert, or the end of one and the start of the next.
  __device__ void load(const Work& work, const uint8_t* weights, int first) {
    const int count = min(kFewStageTiles, work.end - first), tiles = work.phase.tiles();
    const int e = first / tiles, offset = first - e * tiles, head = min(count, tiles - offset);
    uint64_t* full = &s.full[stage];
    uint8_t* dst = ring + stage * (kFewStageTiles * kBytes);
    ptx::mbarrier_arrive_expect_tx(full, count * kBytes);
    ptx::bulk_load(dst, weights + (static_cast<int64_t>(s.expert[e]) * tiles + offset) * kBytes,
                   head * kBytes, full);
    for (int i = head; i < count; ++i) {  // an expert may be a single tile
      const int next = (first + i) / tiles, at = first + i - next * tiles;
      ptx::bulk_load(dst + i * kBytes, weights + (static_cast<int64_t>(s.expert[next]) * tiles + at) * kBytes,
                     kBytes, full);
    }
  }
  // The lane's next `rounds` steps, or all that are left.
  __device__ void produce(int rounds) {
    for (; rounds > 0; --rounds, step += kProducerLanes) {
      const int later = step - up.steps();
      if (later >= down.steps()) return;
      ptx::mbarrier_wait(&s.empty[stage], (lap & 1) ^ 1);
      if (later < 0)
        load(up, a.moe.experts.gate_up, up.begin + step * kFewStageTiles);
      else
        load(down, a.moe.experts.down, down.begin + later * kFewStageTiles);
      for (stage += kProducerLanes; stage >= a.plan.num_stages; stage -= a.plan.num_stages) ++lap;
    }
  }
};

}  // namespace fp4moe::few
