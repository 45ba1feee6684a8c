// The device code of an exchange's results (kernels/device_a2a.h): how blocks share rows, what a rank returns
// for the tokens of other ranks, and the sums of its own tokens. Used by the kernels of ranks that share
// memory (a2a.cu) and of those that do not (a2a_staged.cu).
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/comm/a2a_rows.cuh"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/device_a2a.h"

namespace fp4moe::cuda {

constexpr int kSendBlocks = 256;     // of bf16 rows: more blocks send faster, but have more flags to wait for
constexpr int kLeastCombined = 128;  // vectors in a piece of a result

// How the blocks of a launch share rows: each takes a piece of a row or, if there are at least as many rows
// as blocks, whole rows in turn. The same on all ranks, which wait for every block's flag. Indices have 32
// bits: a 64-bit division takes as long as a load.
struct Work {
  int rows = 0, pieces = 1, blocks = 1;
  int piece_vectors = 0, vectors = 0;  // of a piece and of a row; a vector has kColumns columns
};

// Pieces are multiples of `unit` vectors, and at least `least`.
inline Work work_of(const A2aRound& round, int most_blocks, int least, int unit) {
  const auto vectors = static_cast<int>(round.shape.hidden_size / kColumns),
             rows = static_cast<int>(round.num_tokens);
  const int pieces = std::clamp(most_blocks / std::max(rows, 1), 1, (vectors + least - 1) / least);
  Work work{.rows = rows, .vectors = vectors};
  work.piece_vectors = ((vectors + pieces - 1) / pieces + unit - 1) / unit * unit;
  work.pieces = (vectors + work.piece_vectors - 1) / work.piece_vectors;
  work.blocks = std::clamp(rows * work.pieces, 1, most_blocks);
  return work;
}
// Encoded rows are decoded by as many blocks as send them, which wait and so must be resident at once.
inline Work send_work(const A2aRound& round) {
  return round.shape.row_format == A2aRowFormat::kBf16
             ? work_of(round, kSendBlocks, kThreads, 1)
             : work_of(round, round.group.max_blocks, kThreads, kGroupVectors);
}
inline Work combine_work(const A2aRound& round) {
  return work_of(round, round.group.max_blocks, kLeastCombined, 1);
}

__device__ __forceinline__ int first_row(const Work& work) {
  return static_cast<int>(blockIdx.x) / work.pieces;
}
// Calls use(part) for each part that this block takes.
template <class Use>
__device__ __forceinline__ void for_parts(const Work& work, const Use& use) {
  const int first = first_row(work), piece = static_cast<int>(blockIdx.x) - first * work.pieces;
  const int begin = piece * work.piece_vectors, end = min(begin + work.piece_vectors, work.vectors);
  // With several pieces per row, there is a block for every part, and the loop ends after one.
  for (int row = first; row < work.rows; row += static_cast<int>(gridDim.x))
    use(Part{row, piece, begin, end});
}

// The arguments of the kernels.
struct A2aArgs {
  A2aRound round;
  Work work;
  int num_senders = 0;  // bf16 rows: blocks of each peer's launch for which this launch waits
  const bf16* x = nullptr;
  A2aDecoded decoded;
  A2aResults results;
  float* out = nullptr;
};

inline LaunchShape shape_of(const Work& work) {
  return {dim3(static_cast<unsigned>(work.blocks)), dim3(kThreads)};
}

// Where this rank stores its result for `token` of another rank, outgoing(), and reads the result of `source`
// for its own token, incoming(). `part`: the slot or, if sums return, the index of the sum's rank among the
// ranks with one of the token's experts.
struct SharedPlaces {
  static constexpr bool kIsStaged = false;
  template <class T>
  static __device__ __forceinline__ T* outgoing(const A2aRound& a, int rank, int64_t token, int part) {
    return result_of<T>(a, rank, token, part);
  }
  template <class T>
  static __device__ __forceinline__ T* incoming(const A2aRound& a, int, int64_t token, int part) {
    return result_of<T>(a, a.group.rank, token, part);
  }
};

// Returns the experts' rows, of type Y.
template <class Y>
__device__ __forceinline__ const Y* rows_of(const A2aResults& from) {
  if constexpr (std::is_same_v<Y, bf16>)
    return from.y_bf16;
  else
    return from.y;
}

// What this rank returns for a token: the slots of the lanes (s, token) of all ranks s, in shared memory.
struct Lanes {
  Slots slots[kMaxGroupRanks];
  uint32_t ranks[kMaxGroupRanks];                // bits: the ranks with one of the token's experts
  uint16_t results[kMaxGroupRanks * kMaxSlots];  // that return: kMaxSlots s + k, or s if sums return
  int num_results;
};

// A slot of a lane: slot k in thread k of a warp.
struct LaneSlot {
  int32_t id = -1, row = kNoResult;
  float weight = 0;
};
__device__ __forceinline__ LaneSlot load_slot(const A2aRound& a, const A2aResults& from, int token, int s) {
  const int topk = static_cast<int>(a.shape.top_k), k = static_cast<int>(threadIdx.x) % 32;
  if (s >= a.group.size || k >= topk) return {};
  const int64_t lane = s * a.num_tokens + token;
  return {slot_id(a, lane_ids(a, a.group.rank, lane)),
          from.sums == nullptr ? __ldcg(from.row_of_slot + lane * topk + k) : kNoResult,
          __ldcg(lane_weights(a, a.group.rank, lane) + k)};
}

// `first`: this thread's slot of lane (warp, token). Called by the whole block.
__device__ __forceinline__ void load_lanes(const A2aRound& a, const A2aResults& from, int token,
                                           const LaneSlot& first, Lanes& lanes) {
  const int topk = static_cast<int>(a.shape.top_k), me = a.group.rank;
  const int warp = static_cast<int>(threadIdx.x) / 32, k = static_cast<int>(threadIdx.x) % 32;
  __syncthreads();  // all threads have read the token before
  if (threadIdx.x == 0) lanes.num_results = 0;
  __syncthreads();
  for (int s = warp; s < a.group.size; s += kWarps) {
    if (s == me) continue;
    const LaneSlot slot = s == warp ? first : load_slot(a, from, token, s);
    if (k < topk) {
      lanes.slots[s].rows[k] = slot.row;
      lanes.slots[s].weights[k] = slot.weight;
    }
    const uint32_t ranks = ranks_of(a, slot.id);
    if (k == 0) lanes.ranks[s] = ranks;
    const uint32_t returns = a.shape.slots_return ? __ballot_sync(~0u, slot.row >= 0) : ranks >> me & 1;
    int begin = k == 0 ? atomicAdd(&lanes.num_results, __popc(returns)) : 0;
    begin = __shfl_sync(~0u, begin, 0);
    if (returns >> k & 1)
      lanes.results[begin + __popc(returns & ((1u << k) - 1))] =
          static_cast<uint16_t>(a.shape.slots_return ? kMaxSlots * s + k : s);
  }
  __syncthreads();
}

// This rank's result for a token: the weighted sum of its slots, or the sum that is ready.
template <class Y>
__device__ __forceinline__ RowPiece local_sum(const A2aRound& a, const A2aResults& from, const Slots& slots,
                                              int64_t lane, int vector) {
  const int64_t hidden = a.shape.hidden_size;
  if (from.sums != nullptr) return to_piece(load_raw(from.sums + lane * hidden, vector));
  return weighted_sum(
      slots, static_cast<int>(a.shape.top_k),
      [&](int, int64_t row) { return load_raw(rows_of<Y>(from) + row * hidden, vector); },
      [](int, const Raw<Y>& raw) { return to_piece(raw); });
}

// Stores this rank's results for part.row, a token of each other rank, on those ranks. A warp takes a slot;
// the whole block takes a sum.
template <class Places, class T, class Y>
__device__ void return_results(const A2aRound& a, const A2aResults& from, const Part& part,
                               const Lanes& lanes) {
  const int64_t hidden = a.shape.hidden_size;
  const int warp = static_cast<int>(threadIdx.x) / 32, me = a.group.rank;
  if (a.shape.slots_return) {
    for (int i = warp; i < lanes.num_results; i += kWarps) {
      const int s = lanes.results[i] / kMaxSlots, k = lanes.results[i] % kMaxSlots;
      const Y* const row = rows_of<Y>(from) + lanes.slots[s].rows[k] * hidden;
      T* const to = Places::template outgoing<T>(a, s, part.row, k);
      for_strided<32>(
          part.begin + static_cast<int>(threadIdx.x) % 32, part.end, [&](int v) { return load_raw(row, v); },
          [] {}, [&](int v, const Raw<Y>& raw) { store_piece(to + v * kColumns, to_piece(raw)); });
    }
    return;
  }
  for (int i = 0; i < lanes.num_results; ++i) {
    const int s = lanes.results[i];
    T* const to = Places::template outgoing<T>(a, s, part.row, __popc(lanes.ranks[s] & ((1u << me) - 1)));
    for (int v = part.begin + static_cast<int>(threadIdx.x); v < part.end; v += kThreads)
      store_piece(to + v * kColumns, local_sum<Y>(a, from, lanes.slots[s], s * a.num_tokens + part.row, v));
  }
}

// The slots of a token of this rank, in shared memory. With slots_return, those whose results come from other
// ranks have kReturned.
struct OwnToken {
  Slots slots;
  uint32_t ranks;  // bits: the ranks with one of the token's experts
  int32_t
      sources[kMaxSlots];  // of slots with kReturned: the rank that has the expert; only if Places::kIsStaged
};
// Called by the whole block.
template <class Places>
__device__ __forceinline__ void load_own_token(const A2aRound& a, const A2aResults& from, int token,
                                               OwnToken& own) {
  __syncthreads();  // all threads have read the token before
  if (threadIdx.x < 32) {
    const int topk = static_cast<int>(a.shape.top_k), k = static_cast<int>(threadIdx.x);
    const int32_t id = slot_id(a, a.ids + int64_t{token} * topk);
    if (k < topk) {
      const int64_t slot = (a.group.rank * a.num_tokens + token) * topk + k;
      const int32_t row = from.sums == nullptr ? __ldcg(from.row_of_slot + slot) : kNoResult;
      const bool returned =
          a.shape.slots_return && row < 0 && is_expert(a.shape, id) && rank_of(a.shape, id) < a.group.size;
      own.slots.rows[k] = returned ? kReturned : row;
      if constexpr (Places::kIsStaged) own.sources[k] = returned ? rank_of(a.shape, id) : 0;
      own.slots.weights[k] = __ldcg(a.weights + int64_t{token} * topk + k);
    }
    const uint32_t ranks = ranks_of(a, id);
    if (k == 0) own.ranks = ranks;
  }
  __syncthreads();
}

// The raw vector of a slot's result, which is on this rank or has returned.
template <class T, class Y>
struct SlotRaw {
  Raw<Y> local;
  Raw<T> returned;
};

// The sum of a token's slots: this rank's are read in place, and rounded as those that return.
template <class Places, class T, class Y>
__device__ __forceinline__ RowPiece sum_of_slots(const A2aRound& a, const A2aResults& from, int token,
                                                 const OwnToken& own, int vector) {
  const Slots& slots = own.slots;
  const auto local = [&](int64_t row) { return rows_of<Y>(from) + row * a.shape.hidden_size; };
  const auto returned = [&](int k) {
    return Places::template incoming<T>(a, Places::kIsStaged ? own.sources[k] : 0, token, k);
  };
  const int topk = static_cast<int>(a.shape.top_k);
  if constexpr (std::is_same_v<T, Y>)
    return weighted_sum(
        slots, topk,
        [&](int k, int row) { return load_raw(row == kReturned ? returned(k) : local(row), vector); },
        [](int, const Raw<T>& raw) { return to_piece(raw); });
  else
    return weighted_sum(
        slots, topk,
        [&](int k, int row) {
          SlotRaw<T, Y> raw{};
          if (row == kReturned)
            raw.returned = load_raw(returned(k), vector);
          else
            raw.local = load_raw(local(row), vector);
          return raw;
        },
        [](int row, const SlotRaw<T, Y>& raw) {
          return row == kReturned ? to_piece(raw.returned) : rounded(to_piece(raw.local), T{});
        });
}

// The sum of the results of the ranks, in ascending order.
template <class Places, class T, class Y>
__device__ __forceinline__ RowPiece sum_of_ranks(const A2aRound& a, const A2aResults& from, int token,
                                                 const OwnToken& own, int vector) {
  const int me = a.group.rank;
  RowPiece sum{};
  int index = 0;
  for (uint32_t ranks = own.ranks; ranks != 0; ranks &= ranks - 1, ++index) {
    const int source = __ffs(ranks) - 1;
    const bool is_own = source == me;
    add_scaled(sum, 1,
               is_own ? rounded(local_sum<Y>(a, from, own.slots, me * a.num_tokens + token, vector), T{})
                      : to_piece(load_raw(Places::template incoming<T>(a, source, token, index), vector)));
  }
  return sum;
}

// out += the sum of the results of part.row, a token of this rank.
template <class Places, class T, class Y>
__device__ void add_results(const A2aRound& a, const A2aResults& from, const Part& part, const OwnToken& own,
                            float* out) {
  float* const to = out + part.row * a.shape.hidden_size;
  for (int v = part.begin + static_cast<int>(threadIdx.x); v < part.end; v += kThreads) {
    RowPiece result = to_piece(load_raw(to, v));
    add_scaled(result, 1,
               a.shape.slots_return ? sum_of_slots<Places, T, Y>(a, from, part.row, own, v)
                                    : sum_of_ranks<Places, T, Y>(a, from, part.row, own, v));
    store_piece(to + v * kColumns, result);
  }
}

// Calls function(T{}) with the type of the results that return.
template <class Function>
void with_result_type(const A2aShape& shape, const Function& function) {
  switch (shape.result_format) {
    case A2aResultFormat::kF32:
      return function(float{});
    case A2aResultFormat::kBf16:
      return function(bf16{});
    case A2aResultFormat::kFp8:
      return function(E4m3{});
  }
}

}  // namespace fp4moe::cuda
