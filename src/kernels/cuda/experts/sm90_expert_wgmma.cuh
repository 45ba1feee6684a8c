// Computes an item's sums for many tokens with wgmma, which takes the weights as its register operand: while
// one group of wgmma runs, a warpgroup dequantises the weights of the next group. Device code only.
#pragma once

#include "kernels/cuda/experts/fp4_dequant.cuh"
#include "kernels/cuda/experts/sm90_expert_work.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace fp4moe::sm90 {

constexpr int kSteps = 2;  // steps of 16 columns in a group of wgmma

template <int N, int kCount>
__device__ __forceinline__ void add(float (&d)[kCount], const uint32_t (&a)[kSteps][4], uint64_t tokens) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) Wgmma<N>::add(d, a[s], wgmma_b_advance(tokens, 32 * s));
  wgmma_commit();
}

// d += a * tokens, with the instruction for 16 * n16 tokens. Every N works on the same registers: with a loop
// for each N, ptxas runs out of registers and serialises wgmma.
template <int kCount>
__device__ __forceinline__ void add_any(int n16, float (&d)[kCount], const uint32_t (&a)[kSteps][4],
                                        uint64_t tokens) {
  static_assert(kCount == 48);
  if (n16 <= 2) {
    if (n16 == 1)
      add<16>(d, a, tokens);
    else
      add<32>(d, a, tokens);
  } else if (n16 <= 4) {
    if (n16 == 3)
      add<48>(d, a, tokens);
    else
      add<64>(d, a, tokens);
  } else {
    if (n16 == 5)
      add<80>(d, a, tokens);
    else
      add<96>(d, a, tokens);
  }
}

// Sums of one item over all of K: one tile for each warpgroup.
template <class C>
struct WgmmaSums {
  float d[1][C::kMaxN / 2];

  __device__ __forceinline__ void multiply_tiles(GemmShared<C>& shared, RingPlace<C::kStages>& stage,
                                                 int chunks, int group, int count) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int n16 = __shfl_sync(~0u, (count + 15) / 16, 0);
    uint32_t a[2][kSteps][4];
    int before = -1;
#pragma unroll
    for (int i = 0; i < C::kMaxN / 2; ++i) d[0][i] = 0;
#pragma unroll 1
    for (int first = 0; first < chunks; first += C::kChunks, stage.next()) {
      const int slot = __shfl_sync(~0u, stage.slot, 0);  // lets the compiler know that slot is warp-uniform
      ptx::mbarrier_wait(&shared.full[slot], stage.parity);
      const uint8_t* weights = shared.weights[slot] + group * C::kTileBytes;
      const uint64_t tokens = wgmma_b_descriptor(ptx::shared_address(shared.tokens[slot]));
      TileWords<C::kFormat> words;
#pragma unroll
      for (int i = 0; i < C::kChunks * 4 / kSteps; ++i) {
        const int chunk = i * kSteps / 4, step = i * kSteps % 4;
        if (chunk > 0 && first + chunk >= chunks) break;
        if (step == 0) words.load(weights + chunk * C::kTiles * C::kTileBytes, warp, lane);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          words.decode(step + s, a[i % 2][s]);
          keep_registers(a[i % 2][s]);  // ready before the fence; otherwise, wgmma would be serialised
        }
        add_any(n16, d[0], a[i % 2], wgmma_b_advance(tokens, chunk * C::kChunkBytes + 32 * step));
        wgmma_wait<1>();
        if (i == 0 && before >= 0) release(&shared.empty[before]);
      }
      before = slot;
    }
    wgmma_wait<0>();
    release(&shared.empty[before]);
    keep_registers(d[0]);
  }
};

}  // namespace fp4moe::sm90
