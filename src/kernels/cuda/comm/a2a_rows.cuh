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

constexpr int kThreads = 256, kWarps = kThreads / 32, kColumns = kPieceColumns;
constexpr int kMaxSlots = 32;  // of a token
constexpr int kGroupVectors = int{kFp8Group} / kColumns, kBlockVectors = int{kNvfp4Block} / kColumns;

// A part of a row.
struct Part {
  int row, piece;
  int begin, end;  // vectors of kColumns columns
};
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
// Returns the expert id of this thread's slot, lane k of a warp has slot k; -1 for lanes past top_k.
__device__ __forceinline__ int32_t slot_id(const A2aRound& a, const int32_t* ids) {
  const int k = static_cast<int>(threadIdx.x) % 32;
  return k < static_cast<int>(a.shape.top_k) ? __ldcg(ids + k) : -1;
}
// Returns, as bits, the ranks that get the row of a token whose slots have these ids. Called by whole warps.
__device__ __forceinline__ uint32_t ranks_of(const A2aRound& a, int32_t id) {
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

// The values of two codes; exact, because f16 has all of E4M3's.
__device__ __forceinline__ float2 e4m3_values(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}
__device__ __forceinline__ RowPiece e4m3_piece(const uint2& codes) {
  RowPiece piece;
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    const float2 pair = e4m3_values(static_cast<uint16_t>(i < 4 ? codes.x >> 8 * i : codes.y >> 8 * (i - 4)));
    piece.v[i] = pair.x, piece.v[i + 1] = pair.y;
  }
  return piece;
}
__device__ __forceinline__ uint2 load_raw(const E4m3* p, int vector) {
  return __ldcg(reinterpret_cast<const uint2*>(p) + vector);
}
__device__ __forceinline__ RowPiece to_piece(const uint2& raw) { return e4m3_piece(raw); }
template <class T>
using Raw = decltype(load_raw(static_cast<const T*>(nullptr), 0));

__device__ __forceinline__ void store_piece(E4m3* p, const RowPiece& s) {
  *reinterpret_cast<uint2*>(p) = {ptx::e4m3_word(s.v[0], s.v[1], s.v[2], s.v[3]),
                                  ptx::e4m3_word(s.v[4], s.v[5], s.v[6], s.v[7])};
}

// Rounds a result as if it had returned as T.
__device__ __forceinline__ RowPiece rounded(const RowPiece& piece, float) { return piece; }
__device__ __forceinline__ RowPiece rounded(RowPiece piece, bf16) {
#pragma unroll
  for (float& v : piece.v) v = __bfloat162float(__float2bfloat16_rn(v));
  return piece;
}
__device__ __forceinline__ RowPiece rounded(RowPiece piece, E4m3) {
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    const float2 pair = e4m3_values(static_cast<uint16_t>(ptx::e4m3_pair(piece.v[i], piece.v[i + 1])));
    piece.v[i] = pair.x, piece.v[i + 1] = pair.y;
  }
  return piece;
}

// The slots of a token, in shared memory.
struct Slots {
  int32_t rows[kMaxSlots];  // of the slots' results on this rank
  float weights[kMaxSlots];
};
constexpr int32_t kNoResult = -1, kReturned = -2;  // instead of a row; kReturned: comes from another rank

// sum over the slots, in top-k order, of weight * piece_of(k, raw), where raw = load(k, row). Slots with
// kNoResult are skipped. The loads of several slots are under way at once.
template <class Load, class PieceOf>
__device__ __forceinline__ RowPiece weighted_sum(const Slots& slots, int topk, const Load& load,
                                                 const PieceOf& piece_of) {
  using Loaded = decltype(load(0, 0));
  constexpr int kAtOnce = sizeof(Loaded) <= 16 ? 8 : 4;
  RowPiece sum{};
  for (int first = 0; first < topk; first += kAtOnce) {
    Loaded raw[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int k = first + j; k < topk && slots.rows[k] != kNoResult) raw[j] = load(k, slots.rows[k]);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int k = first + j; k < topk && slots.rows[k] != kNoResult)
        add_scaled(sum, slots.weights[k], piece_of(slots.rows[k], raw[j]));
  }
  return sum;
}

// ---- rows ------------------------------------------------------------------------------------------

// Calls use(v, load(v)) for v = first, first + kStride, ..., below end. Several loads are under way at once,
// which the stores in `use` would otherwise keep apart. `ready` is called once, after the first loads, by
// every thread: what it reads is fetched at the same time.
template <int kStride, class Load, class Ready, class Use>
__device__ __forceinline__ void for_strided(int first, int end, const Load& load, const Ready& ready,
                                            const Use& use) {
  constexpr int kAtOnce = 4;
  decltype(load(first)) loaded[kAtOnce];
  const auto fetch = [&] {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int v = first + j * kStride; v < end) loaded[j] = load(v);
  };
  fetch();
  ready();
  for (; first < end; first += kAtOnce * kStride, fetch()) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int v = first + j * kStride; v < end) use(v, loaded[j]);
  }
}
// The same for this thread's vectors of a part.
template <class Load, class Ready, class Use>
__device__ __forceinline__ void for_vectors(const Part& part, const Load& load, const Ready& ready,
                                            const Use& use) {
  for_strided<kThreads>(part.begin + static_cast<int>(threadIdx.x), part.end, load, ready, use);
}
template <class Load, class Use>
__device__ __forceinline__ void for_vectors(const Part& part, const Load& load, const Use& use) {
  for_vectors(
      part, load, [] {}, use);
}

// The lanes that get a row: the same one on each rank in the bits `ranks`.
struct Lane {
  uint32_t ranks;
  int64_t index;
};
// Calls store(lane's row) for each rank.
template <class Store>
__device__ __forceinline__ void for_each_rank(const A2aRound& a, const Lane& lane, const Store& store) {
  for (uint32_t ranks = lane.ranks; ranks != 0; ranks &= ranks - 1)
    store(lane_row(a, __ffs(ranks) - 1, lane.index));
}

// Stores a part of a row in its lane on the ranks of the experts `id` (slot_id()).
__device__ __forceinline__ void copy_row(const A2aRound& a, const Part& part, const bf16* from, int32_t id,
                                         int64_t lane) {
  uint32_t ranks = 0;
  for_vectors(
      part, [&](int v) { return __ldcg(reinterpret_cast<const uint4*>(from) + v); },
      [&] { ranks = ranks_of(a, id); },
      [&](int v, const uint4& words) {
        for_each_rank(a, {ranks, lane}, [&](uint8_t* row) { reinterpret_cast<uint4*>(row)[v] = words; });
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
__device__ inline float largest_of_row(const bf16* row, int vectors) {
  __shared__ float warps[kThreads / 32];
  float most = 0;
  for_vectors(
      {0, 0, 0, vectors}, [&](int v) { return __ldcg(reinterpret_cast<const uint4*>(row) + v); },
      [&](int, const uint4& words) { most = fmaxf(most, largest(unpack_piece(words))); });
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

// The factors of a row's NVFP4 codes.
struct Nvfp4RowScale {
  float encode = 1, decode = 1;
  float tensor_scale = 1;  // that travels with the row
};
// `given`: *a.nvfp4_scale, unless that is null. Called by the whole block.
__device__ __forceinline__ Nvfp4RowScale nvfp4_row_scale(const A2aRound& a, const bf16* row, float given) {
  if (a.nvfp4_scale != nullptr) {
    const float decode = __fdiv_rn(1.0f, given);
    return {given, decode, decode};
  }
  const float most = largest_of_row(row, static_cast<int>(a.shape.hidden_size / kColumns));
  const float encode = nvfp4_row_encode_scale(most), decode = __fdiv_rn(1.0f, encode);
  return {encode, decode, most == 0 ? 0.0f : decode};
}

// Stores eight columns of a row, encoded, in its lane on each of the ranks. Called by whole warps, because
// the threads that share a scale exchange maxima; those past the row's end pass zeros and are not `inside`.
template <A2aRowFormat kFormat>
__device__ __forceinline__ void encode_vector(const A2aRound& a, const RowPiece& piece,
                                              const Nvfp4RowScale& row_scale, int v, bool inside,
                                              const Lane& lane) {
  if constexpr (kFormat == A2aRowFormat::kFp8) {
    float scale;
    const uint2 codes = fp8_codes(piece, scale);
    if (!inside) return;
    for_each_rank(a, lane, [&](uint8_t* row) {
      reinterpret_cast<uint2*>(row)[v] = codes;
      if (v % kGroupVectors == 0)
        reinterpret_cast<float*>(row + a.shape.scales_offset())[v / kGroupVectors] = scale;
    });
  } else {
    uint8_t block_scale;
    const uint32_t codes = nvfp4_codes(piece, row_scale.encode, row_scale.decode, block_scale);
    if (!inside) return;
    for_each_rank(a, lane, [&](uint8_t* row) {
      reinterpret_cast<uint32_t*>(row)[v] = codes;
      if (v % kBlockVectors == 0) row[a.shape.scales_offset() + v / kBlockVectors] = block_scale;
    });
  }
}

// Encodes a part of a row and stores it in its lane on the ranks of the experts `id` (slot_id()). Called by
// whole blocks.
template <A2aRowFormat kFormat>
__device__ void encode_row(const A2aRound& a, const Part& part, const bf16* from, int32_t id, int64_t lane) {
  constexpr int kAtOnce = 4;  // loads under way
  uint4 words[kAtOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int v = first + static_cast<int>(threadIdx.x) + j * kThreads;
      words[j] = v < part.end ? __ldcg(reinterpret_cast<const uint4*>(from) + v) : uint4{};
    }
  };
  load(part.begin);
  const float given_scale =
      kFormat == A2aRowFormat::kNvfp4 && a.nvfp4_scale != nullptr ? __ldg(a.nvfp4_scale) : 0;
  const uint32_t ranks = ranks_of(a, id);
  if (ranks == 0) return;
  Nvfp4RowScale scale;
  if constexpr (kFormat == A2aRowFormat::kNvfp4) {
    scale = nvfp4_row_scale(a, from, given_scale);
    if (part.piece == 0 && threadIdx.x == 0)
      for_each_rank(a, {ranks, lane}, [&](uint8_t* row) {
        *reinterpret_cast<float*>(row + a.shape.tensor_scale_offset()) = scale.tensor_scale;
      });
  }
  for (int first = part.begin; first < part.end;) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * kThreads >= part.end) break;  // for the whole block
      const int v = first + static_cast<int>(threadIdx.x) + j * kThreads;
      encode_vector<kFormat>(a, unpack_piece(words[j]), scale, v, v < part.end, {ranks, lane});
    }
    first += kAtOnce * kThreads;
    if (first < part.end) load(first);
  }
}

// Eight columns as they arrive.
template <A2aRowFormat kFormat>
struct ArrivedVector {
  uint2 codes;  // NVFP4: only x
  float scale;

  static __device__ __forceinline__ ArrivedVector load(const uint8_t* row, int64_t scales_offset, int v) {
    const uint8_t* const scales = row + scales_offset;
    if constexpr (kFormat == A2aRowFormat::kFp8)
      return {__ldcg(reinterpret_cast<const uint2*>(row) + v),
              __ldcg(reinterpret_cast<const float*>(scales) + v / kGroupVectors)};
    else
      return {{__ldcg(reinterpret_cast<const uint32_t*>(row) + v), 0},
              e4m3_values(__ldcg(scales + v / kBlockVectors)).x};
  }
  __device__ __forceinline__ RowPiece values(float tensor_scale) const {
    RowPiece piece;
    if constexpr (kFormat == A2aRowFormat::kFp8) {
      piece = e4m3_piece(codes);
#pragma unroll
      for (float& x : piece.v) x = __fmul_rn(x, scale);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        piece.v[i] = __fmul_rn(__fmul_rn(e2m1_decode(codes.x >> 4 * i & 0xf), scale), tensor_scale);
    }
    return piece;
  }
};

// Decodes a part of a lane's row to bf16, if the row has a local expert. The lane's ids are fetched together
// with its codes.
template <A2aRowFormat kFormat>
__device__ void decode_row(const A2aRound& a, const Part& part, const A2aDecoded& to) {
  using Vector = ArrivedVector<kFormat>;
  const A2aShape& shape = a.shape;
  const int me = a.group.rank;
  const int32_t id = slot_id(a, lane_ids(a, me, part.row));
  const uint8_t* const row = lane_row(a, me, part.row);
  float tensor_scale = 1;
  if constexpr (kFormat == A2aRowFormat::kNvfp4)
    tensor_scale = __ldcg(reinterpret_cast<const float*>(row + shape.tensor_scale_offset()));
  bool is_local = false;
  bf16* const out = to.rows + part.row * shape.hidden_size;
  for_vectors(
      part, [&](int v) { return Vector::load(row, shape.scales_offset(), v); },
      [&] {
        is_local = (ranks_of(a, id) >> me & 1) != 0;
        if (is_local && to.tensor_scales != nullptr && part.piece == 0 && threadIdx.x == 0)
          to.tensor_scales[part.row] = tensor_scale;
        if (to.keeps_nvfp4) tensor_scale = 1;
      },
      [&](int v, const Vector& vector) {
        if (is_local) store_piece(out + v * kColumns, vector.values(tensor_scale));
      });
}

}  // namespace fp4moe::cuda
