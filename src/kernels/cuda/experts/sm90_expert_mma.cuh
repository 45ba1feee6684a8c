// Computes an item's sums for few tokens with mma.sync; a warp has 16 rows of each of its group's tiles,
// which are kGroups apart in a stage. Device code only.
#pragma once

#include "kernels/cuda/experts/fp4_dequant.cuh"
#include "kernels/cuda/experts/fp4_to_fp8.cuh"
#include "kernels/cuda/experts/sm90_expert_work.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"

namespace fp4moe::sm90 {

// Loads 8 tokens x 32 columns as the B fragments of two k steps: {step 0: k 0 ... 7, 8 ... 15; step 1:
// likewise}.
__device__ __forceinline__ void load_tokens8(uint32_t shared_address, uint32_t (&b)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(shared_address));
}

// Sums of one item over all of K: kGroupTiles of the group's tiles times 8 kBlocks tokens.
template <class C, int kGroupTiles, int kBlocks>
struct MmaSums {
  static constexpr int kStride = C::kGroups * C::kTileBytes;  // from a tile of the group to the next
  float d[kGroupTiles][kBlocks * 4];

  // w4a8: adds the products of 128 columns. tokens: shared address for the lane's row and q, in a stage's
  // first token block.
  __device__ __forceinline__ void add_fp8(const uint8_t* tiles, const uint2* table, uint32_t tokens, int warp,
                                          int lane) {
    Fp8TileWords<C::kFormat> words[kGroupTiles];
#pragma unroll
    for (int t = 0; t < kGroupTiles; ++t) words[t].load(tiles + t * kStride, table, warp, lane);
    const uint32_t swap = lane / 4 % 2 * 64;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint4 b[kBlocks];
      const uint32_t at = tokens + step / 2 * C::kChunkBytes + (step % 2 * 64 ^ swap);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) b[n] = ptx::load_shared16(at + n * 1024);
#pragma unroll
      for (int t = 0; t < kGroupTiles; ++t) {
        uint32_t a[2][4];
        words[t].make_f16(step, a);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          auto& sums = *reinterpret_cast<float(*)[4]>(&d[t][4 * n]);
          ptx::mma_f16(sums, a[0], b[n].x, b[n].y);
          ptx::mma_f16(sums, a[1], b[n].z, b[n].w);
        }
      }
    }
  }

  // Adds the products of 64 columns. tokens: shared address of the lane's row, in the first token block.
  __device__ __forceinline__ void add(const uint8_t* tiles, uint32_t tokens, int warp, int lane) {
    TileWords<C::kFormat> words[kGroupTiles];
#pragma unroll
    for (int t = 0; t < kGroupTiles; ++t) words[t].load(tiles + t * kStride, warp, lane);
    const int row = lane % 8, piece = lane / 8;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t b[kBlocks][4];
      const uint32_t at = tokens + ((4 * pair + piece) ^ row) * 16;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) load_tokens8(at + n * 1024, b[n]);
#pragma unroll
      for (int t = 0; t < kGroupTiles; ++t)
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          uint32_t a[4];
          words[t].decode(2 * pair + s, a);
#pragma unroll
          for (int n = 0; n < kBlocks; ++n)
            ptx::mma_bf16(*reinterpret_cast<float(*)[4]>(&d[t][4 * n]), a, b[n][2 * s], b[n][2 * s + 1]);
        }
    }
  }

  __device__ __forceinline__ void multiply_tiles(GemmShared<C>& shared, RingPlace<C::kStages>& stage,
                                                 int chunks, int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kGroupTiles; ++t)
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) d[t][i] = 0;
    const uint32_t row =
        ptx::shared_address(shared.tokens) + (C::kFp8 ? lane / 4 * 128 + lane % 4 * 16 : lane % 8 * 128);
#pragma unroll 1
    for (int first = 0; first < chunks; first += C::kChunks, stage.next()) {
      ptx::mbarrier_wait(&shared.full[stage.slot], stage.parity);
      const uint8_t* tiles = shared.weights[stage.slot] + group * C::kTileBytes;
      const uint32_t tokens = row + stage.slot * (C::kChunks * C::kChunkBytes);
      if constexpr (C::kFp8) {
        add_fp8(tiles, shared.table, tokens, warp, lane);
      } else {
#pragma unroll
        for (int chunk = 0; chunk < C::kChunks; ++chunk) {
          if (chunk > 0 && first + chunk >= chunks) break;
          add(tiles + chunk * C::kTiles * C::kTileBytes, tokens + chunk * C::kChunkBytes, warp, lane);
        }
      }
      release(&shared.empty[stage.slot]);
    }
  }
};

}  // namespace fp4moe::sm90
