// The rows and results of an exchange in the ranks' memory (kernels/device_a2a.h): where they are, and their
// formats. Device code only.
#pragma once

#include <cuda_fp16.h>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/nvfp4_block.cuh"
#include "kernels/cuda/ptx/ptx_e4m3.cuh"
#include "kernels/cuda/ptx/row_piece.cuh"
#include "kernels/device_a2a.h"

namespace fp4moe::cuda {

constexpr int kThreads = 256, kColumns = kPieceColumns;
constexpr int kMaxSlots = 32;  // of a token
constexpr int kGroupVectors = kFp8Group / kColumns, kBlockVectors = kNvfp4Block / kColumns;

// A part of a row.
struct Part {
  int64_t row;
  int piece;
  int64_t begin, end;  // vectors of kColumns columns
};
template <class T>
__device__ __forceinline__ T* exchange_memory(const CommGroup& group, int rank, int64_t offset) {
  return reinterpret_cast<T*>(group.regions[rank] + group.layout.exchange + offset);
}
__device__ __forceinline__ uint8_t* lane_row(const A2aRound& a, int rank, int64_t lane) {
  return exchange_memory<uint8_t>(a.group, rank, a.area.rows) + lane * a.shape.row_bytes();
}
__device__ __forceinline__ int32_t* lane_ids(const A2aRound& a, int rank, int64_t lane) {
  return exchange_memory<int32_t>(a.group, rank, a.area.ids) + lane * a.shape.top_k;
}
__device__ __forceinline__ float* lane_weights(const A2aRound& a, int rank, int64_t lane) {
  return exchange_memory<float>(a.group, rank, a.area.weights) + lane * a.shape.top_k;
}

__device__ __forceinline__ bool is_expert(const A2aShape& shape, int32_t id) {
  return id >= 0 && id < shape.num_experts;
}
__device__ __forceinline__ bool is_filled(const A2aRound& a, int64_t token) {
  return token < a.num_own && (a.num_filled == nullptr || a.first_token + token < *a.num_filled);
}
// Returns the rank of an expert, which may be outside the group while the group rehearses.
__device__ __forceinline__ int rank_of(const A2aShape& shape, int32_t id) {
  return id / static_cast<int32_t>(shape.experts_per_rank);
}
// Returns, as bits, the ranks that get the row of a token with these experts. Called by whole warps.
__device__ __forceinline__ uint32_t ranks_of(const A2aRound& a, const int32_t* ids) {
  const int k = static_cast<int>(threadIdx.x) % 32;
  const int32_t id = k < static_cast<int>(a.shape.top_k) ? __ldcg(ids + k) : -1;
  const uint32_t all = (1u << a.group.size) - 1;
  const uint32_t bits = !is_expert(a.shape, id)         ? 0
                        : a.shape.experts_per_rank == 0 ? all
                                                        : 1u << rank_of(a.shape, id);
  return __reduce_or_sync(~0u, bits) & all;
}

// Returns the place of a token's result `part` on the token's rank.
template <class T>
__device__ __forceinline__ T* result_of(const A2aRound& a, int rank, int64_t token, int64_t part) {
  const int64_t place = token * a.shape.parts(a.group.size) + part;
  return exchange_memory<T>(a.group, rank, a.area.returns) + place * a.shape.hidden_size;
}

// ---- results ---------------------------------------------------------------------------------------

// Type of results that return as FP8.
struct E4m3 {
  uint8_t code;
};

// Other GPUs write this memory, so the loads bypass L1.
__device__ __forceinline__ RowPiece load_piece(const float* p, int64_t vector) {
  const auto* const v = reinterpret_cast<const float4*>(p) + 2 * vector;
  return unpack_piece(__ldcg(v), __ldcg(v + 1));
}
__device__ __forceinline__ RowPiece load_piece(const bf16* p, int64_t vector) {
  return unpack_piece(__ldcg(reinterpret_cast<const uint4*>(p) + vector));
}
// The values of two codes; exact, because f16 has all of E4M3's.
__device__ __forceinline__ float2 e4m3_values(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}
__device__ __forceinline__ RowPiece load_piece(const E4m3* p, int64_t vector) {
  const uint2 codes = __ldcg(reinterpret_cast<const uint2*>(p) + vector);
  RowPiece piece;
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    const float2 pair = e4m3_values(static_cast<uint16_t>(i < 4 ? codes.x >> 8 * i : codes.y >> 8 * (i - 4)));
    piece.v[i] = pair.x, piece.v[i + 1] = pair.y;
  }
  return piece;
}
__device__ __forceinline__ void store_piece(E4m3* p, const RowPiece& s) {
  *reinterpret_cast<uint2*>(p) = {ptx::e4m3_pair(s.v[0], s.v[1]) | ptx::e4m3_pair(s.v[2], s.v[3]) << 16,
                                  ptx::e4m3_pair(s.v[4], s.v[5]) | ptx::e4m3_pair(s.v[6], s.v[7]) << 16};
}

// The slots of a token, in shared memory.
struct Slots {
  int32_t rows[kMaxSlots];  // of the slots' results; -1: none
  float weights[kMaxSlots];
};

// sum over the slots, in top-k order, of weight * load(row).
template <class Load>
__device__ __forceinline__ RowPiece weighted_sum(const Slots& slots, int topk, const Load& load) {
  RowPiece sum{};
#pragma unroll 4
  for (int k = 0; k < topk; ++k) {
    const int32_t row = slots.rows[k];
    const RowPiece piece = row >= 0 ? load(row) : RowPiece{};
    add_scaled(sum, row >= 0 ? slots.weights[k] : 0, piece);
  }
  return sum;
}

// ---- rows ------------------------------------------------------------------------------------------

// Calls use(v, load(v)) for this thread's vectors of a part. Several loads are under way at once, which the
// stores in `use` would otherwise keep apart.
template <class Load, class Use>
__device__ __forceinline__ void for_vectors(const Part& part, const Load& load, const Use& use) {
  constexpr int kAtOnce = 4;
  for (int64_t first = part.begin + threadIdx.x; first < part.end; first += kAtOnce * kThreads) {
    decltype(load(first)) loaded[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int64_t v = first + j * kThreads; v < part.end) loaded[j] = load(v);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int64_t v = first + j * kThreads; v < part.end) use(v, loaded[j]);
  }
}

// Calls store(lane's row) for each rank in the bits `ranks`.
template <class Store>
__device__ __forceinline__ void for_each_rank(const A2aRound& a, uint32_t ranks, int64_t lane,
                                              const Store& store) {
  for (; ranks != 0; ranks &= ranks - 1) store(lane_row(a, __ffs(ranks) - 1, lane));
}

__device__ __forceinline__ void copy_row(const A2aRound& a, const Part& part, const bf16* from,
                                         uint32_t ranks, int64_t lane) {
  for_vectors(
      part, [&](int64_t v) { return __ldcg(reinterpret_cast<const uint4*>(from) + v); },
      [&](int64_t v, const uint4& words) {
        for_each_rank(a, ranks, lane, [&](uint8_t* row) { reinterpret_cast<uint4*>(row)[v] = words; });
      });
}

// NaN elements are ignored.
__device__ __forceinline__ float largest(const RowPiece& piece) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) most = fmaxf(most, fabsf(piece.v[i]));
  return most;
}
// Returns the maximum over each kLanes neighbouring threads.
template <int kLanes>
__device__ __forceinline__ float largest_of_lanes(float most) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
  return most;
}

// Returns the largest magnitude in the row; called by the whole block.
__device__ inline float largest_of_row(const bf16* row, int64_t vectors) {
  __shared__ float warps[kThreads / 32];
  float most = 0;
  for_vectors(
      {0, 0, 0, vectors}, [&](int64_t v) { return __ldcg(reinterpret_cast<const uint4*>(row) + v); },
      [&](int64_t, const uint4& words) { most = fmaxf(most, largest(unpack_piece(words))); });
  most = largest_of_lanes<32>(most);
  __syncthreads();  // the row before has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  most = warps[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) most = fmaxf(most, warps[i]);
  return most;
}

// Returns eight columns as E4M3 codes and sets the scale of their group of 128, which half a warp holds.
__device__ __forceinline__ uint2 fp8_codes(const RowPiece& piece, float& scale) {
  scale = __fdiv_rn(fminf(largest_of_lanes<kGroupVectors>(largest(piece)), kMaxFloat), kE4m3Max);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    const float low = scale == 0 ? __fmul_rn(piece.v[i], 0.0f) : __fdiv_rn(piece.v[i], scale);
    const float high = scale == 0 ? __fmul_rn(piece.v[i + 1], 0.0f) : __fdiv_rn(piece.v[i + 1], scale);
    pairs[i / 2] = ptx::e4m3_pair(low, high);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// Returns eight columns as E2M1 codes and sets the scale of their block of 16, which two threads hold.
__device__ __forceinline__ uint32_t nvfp4_codes(const RowPiece& piece, float encode, float decode,
                                                uint8_t& block_scale) {
  const Nvfp4BlockScale scale =
      nvfp4_block_scale(largest_of_lanes<kBlockVectors>(largest(piece)), encode, decode);
  block_scale = scale.code;
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    codes |= uint32_t{e2m1_encode(__fmul_rn(piece.v[i], scale.multiplier))} << 4 * i;
  return codes;
}

// Encodes a part of a row and stores it in its lane on each of the ranks. Called by whole blocks.
template <A2aRowFormat kFormat>
__device__ void encode_row(const A2aRound& a, const Part& part, const bf16* from, uint32_t ranks,
                           int64_t lane) {
  const A2aShape& shape = a.shape;
  float encode = 1, decode = 1;
  if constexpr (kFormat == A2aRowFormat::kNvfp4) {
    float tensor_scale;
    if (a.nvfp4_scale != nullptr) {
      encode = __ldg(a.nvfp4_scale);
      tensor_scale = decode = __fdiv_rn(1.0f, encode);
    } else {
      const float most = largest_of_row(from, shape.hidden_size / kColumns);
      encode = nvfp4_row_encode_scale(most);
      decode = __fdiv_rn(1.0f, encode);
      tensor_scale = most == 0 ? 0.0f : decode;
    }
    if (part.piece == 0 && threadIdx.x == 0)
      for_each_rank(a, ranks, lane, [&](uint8_t* row) {
        *reinterpret_cast<float*>(row + shape.tensor_scale_offset()) = tensor_scale;
      });
  }
  // Whole warps exchange maxima, so a piece past the end is zeros.
  constexpr int kAtOnce = 4;  // loads under way
  for (int64_t first = part.begin; first < part.end; first += kAtOnce * kThreads) {
    uint4 words[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t v = first + threadIdx.x + j * kThreads;
      words[j] = v < part.end ? __ldcg(reinterpret_cast<const uint4*>(from) + v) : uint4{};
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * kThreads >= part.end) break;  // for the whole block
      const int64_t v = first + threadIdx.x + j * kThreads;
      const bool inside = v < part.end;
      const RowPiece piece = unpack_piece(words[j]);
      if constexpr (kFormat == A2aRowFormat::kFp8) {
        float scale;
        const uint2 codes = fp8_codes(piece, scale);
        if (!inside) continue;
        for_each_rank(a, ranks, lane, [&](uint8_t* row) {
          reinterpret_cast<uint2*>(row)[v] = codes;
          if (v % kGroupVectors == 0)
            reinterpret_cast<float*>(row + shape.scales_offset())[v / kGroupVectors] = scale;
        });
      } else {
        uint8_t block_scale;
        const uint32_t codes = nvfp4_codes(piece, encode, decode, block_scale);
        if (!inside) continue;
        for_each_rank(a, ranks, lane, [&](uint8_t* row) {
          reinterpret_cast<uint32_t*>(row)[v] = codes;
          if (v % kBlockVectors == 0) row[shape.scales_offset() + v / kBlockVectors] = block_scale;
        });
      }
    }
  }
}

// Decodes a part of a lane's row to bf16, if the row has a local expert.
template <A2aRowFormat kFormat>
__device__ void decode_row(const A2aRound& a, const Part& part, const A2aDecoded& to) {
  const A2aShape& shape = a.shape;
  const int me = a.group.rank;
  if ((ranks_of(a, lane_ids(a, me, part.row)) >> me & 1) == 0) return;
  const uint8_t* const row = lane_row(a, me, part.row);
  const uint8_t* const scales = row + shape.scales_offset();
  float tensor_scale = 1;
  if constexpr (kFormat == A2aRowFormat::kNvfp4) {
    tensor_scale = __ldcg(reinterpret_cast<const float*>(row + shape.tensor_scale_offset()));
    if (to.tensor_scales != nullptr && part.piece == 0 && threadIdx.x == 0)
      to.tensor_scales[part.row] = tensor_scale;
    if (to.keeps_nvfp4) tensor_scale = 1;
  }
  bf16* const out = to.rows + part.row * shape.hidden_size;
  if constexpr (kFormat == A2aRowFormat::kFp8) {
    struct Codes {
      RowPiece values;
      float scale;
    };
    for_vectors(
        part,
        [&](int64_t v) {
          return Codes{load_piece(reinterpret_cast<const E4m3*>(row), v),
                       __ldcg(reinterpret_cast<const float*>(scales) + v / kGroupVectors)};
        },
        [&](int64_t v, Codes& codes) {
#pragma unroll
          for (float& x : codes.values.v) x = __fmul_rn(x, codes.scale);
          store_piece(out + v * kColumns, codes.values);
        });
  } else {
    struct Codes {
      uint32_t values;
      uint8_t scale;
    };
    for_vectors(
        part,
        [&](int64_t v) {
          return Codes{__ldcg(reinterpret_cast<const uint32_t*>(row) + v),
                       __ldcg(scales + v / kBlockVectors)};
        },
        [&](int64_t v, const Codes& codes) {
          const float scale = e4m3_values(codes.scale).x;
          RowPiece piece;
#pragma unroll
          for (int i = 0; i < kColumns; ++i)
            piece.v[i] = __fmul_rn(__fmul_rn(e2m1_decode(codes.values >> 4 * i & 0xf), scale), tensor_scale);
          store_piece(out + v * kColumns, piece);
        });
  }
}

}  // namespace fp4moe::cuda
