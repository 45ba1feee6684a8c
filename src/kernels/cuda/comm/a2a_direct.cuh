// The memory of direct rounds (kernels/device_a2a.h). Device code only.
//
//   rank A                                       rank B
//   send_direct   stores its rows on all ranks   send_direct
//   experts       waits for the lanes' words     experts          marks the other buffer's words as unsent,
//                                                                 then stores sums on all ranks
//   add_direct    takes the sums of all ranks    add_direct
//
// A's rows of round n + 2 replace those of n in B's memory. A sends them after it has taken B's sums of
// n + 1, which B stores after it has marked the words of n. A's sums of n + 1 replace those of n: they depend
// on B's rows of n + 1, which B sends after it has marked the sums of n.
#pragma once

#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/row_piece.cuh"
#include "kernels/device_a2a.h"

namespace fp4moe::cuda {

// One direct round, as a thread sees it.
struct DirectRound {
  const A2aRound& a;
  uint32_t num_before;  // rounds before this one

  // All kernels of the last round have ended.
  __device__ __forceinline__ explicit DirectRound(const A2aRound& round) : a(round) {
    const CommState* const state = state_of(a.group, a.group.rank);
    num_before = *const_cast<const volatile uint32_t*>(&state->num_direct);
  }
  __device__ __forceinline__ uint32_t buffer() const { return num_before & 1; }
  __device__ __forceinline__ bf16* row(int rank, int lane) const { return row(rank, lane, buffer()); }
  // x: the id, y: the weight.
  __device__ __forceinline__ uint2* slots(int rank, int lane) const { return slots(rank, lane, buffer()); }
  __device__ __forceinline__ bf16* row(int rank, int lane, uint32_t of) const {
    return exchange_memory<bf16>(a.group, rank, a.area.direct_rows) + place(lane, of) * a.shape.hidden_size;
  }
  __device__ __forceinline__ uint2* slots(int rank, int lane, uint32_t of) const {
    return exchange_memory<uint2>(a.group, rank, a.area.direct_slots) + place(lane, of) * a.shape.top_k;
  }
  // The sum of rank `source` for a token of `rank`.
  template <class T>
  __device__ __forceinline__ T* sum(int rank, int token, int source) const {
    const int64_t at = int64_t{token} * a.group.size + source;
    return exchange_memory<T>(a.group, rank, a.area.direct_sums) + at * a.shape.hidden_size;
  }

 private:
  static __device__ __forceinline__ int64_t place(int lane, uint32_t of) {
    return int64_t{of} * kDirectLanes + lane;
  }
};

// Stores this rank's tokens in its lanes on all ranks; does nothing if the group has failed.
struct DirectSender {
  DirectRound round;
  bool failed;

  __device__ __forceinline__ explicit DirectSender(const A2aRound& a)
      : round(a), failed(Operation(a.group, a.op, Entered{}).failed) {}

  // Vector v of the token's row: eight columns in bf16.
  __device__ __forceinline__ void store_row(int token, int v, const uint4& words) const {
    on_all_ranks(token, [&](int r, int lane) {
      store_words(round.row(r, lane) + int64_t{v} * kPieceColumns, sendable(words));
    });
  }
  // is_sent: the token is not padding, and id names an expert.
  __device__ __forceinline__ void store_slot(int token, int k, bool is_sent, int32_t id, float weight) const {
    // kUnsent is -1 as an id; the lanes' readers drop any other negative id too.
    const uint2 words = {is_sent ? static_cast<uint32_t>(id) : 1u << 31,
                         is_sent ? sendable(__float_as_uint(weight)) : 0};
    on_all_ranks(token, [&](int r, int lane) { store_words(round.slots(r, lane) + k, words); });
  }

 private:
  template <class Store>
  __device__ __forceinline__ void on_all_ranks(int token, const Store& store) const {
    if (failed) return;
    const int ranks = round.a.group.size, me = round.a.group.rank;
    const int lane = me * static_cast<int>(round.a.num_tokens) + token;
    for (int r = 0; r < ranks; ++r) store(r, lane);
  }
};

}  // namespace fp4moe::cuda
