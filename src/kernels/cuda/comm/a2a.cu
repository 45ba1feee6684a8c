// Sends token rows to the ranks of their experts and results back, between the GPUs of a group.
//
// Computes:  send: stores rows, ids and weights in the ranks' lanes. combine: stores the lanes' results in
//            places on the tokens' ranks; out [t] += the results of token t. choose_replicas: maps ids.
// Shapes:    H a multiple of 8, K up to 32; any T, any number of ranks up to kMaxGroupRanks.
// Bytes:     per token. send: 2 H to each rank with one of the token's experts, 8 K to all ranks. combine:
// one
//            result from each such rank, or K rows; then reads them, and reads and writes 4 H. A rank's own
//            results are not copied.
// Bound:     the links for many tokens; for few tokens, the latency of a store and of polling a flag.
// Numerics:  rows are copied. A sum over slots uses fma in top-k order; a sum over ranks adds in rank order.
#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "kernels/cuda/comm/a2a_rows.cuh"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/device_a2a.h"

namespace fp4moe::cuda {
namespace {

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
Work work_of(const A2aRound& round, int most_blocks, int least, int unit) {
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
Work send_work(const A2aRound& round) {
  return round.shape.row_format == A2aRowFormat::kBf16
             ? work_of(round, kSendBlocks, kThreads, 1)
             : work_of(round, round.group.max_blocks, kThreads, kGroupVectors);
}
Work combine_work(const A2aRound& round) { return work_of(round, round.group.max_blocks, kLeastCombined, 1); }

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

struct Args {
  A2aRound round;
  Work work;
  int num_senders = 0;  // bf16 rows: blocks of each peer's launch for which this launch waits
  const bf16* x = nullptr;
  A2aDecoded decoded;
  A2aResults results;
  float* out = nullptr;
};

// Stores part of a row of x, a token of this rank, in its lanes.
template <A2aRowFormat kFormat>
__device__ __forceinline__ void send_part(const A2aRound& a, const bf16* x, const Part& part) {
  const int64_t row = part.row, lane = a.group.rank * a.num_tokens + row;
  const int32_t slot = slot_id(a, a.ids + row * a.shape.top_k), id = is_filled(a, row) ? slot : -1;
  const bf16* const from = x + row * a.shape.hidden_size;
  if constexpr (kFormat == A2aRowFormat::kBf16)
    copy_row(a, part, from, id, lane);
  else
    encode_row<kFormat>(a, part, from, id, lane);
}

// Stores a token's expert ids and weights in its lanes on all ranks.
__device__ __forceinline__ void send_ids(const A2aRound& a, int row) {
  const int topk = static_cast<int>(a.shape.top_k), k = static_cast<int>(threadIdx.x) % 32;
  if (k >= topk) return;
  const int64_t lane = a.group.rank * a.num_tokens + row, slot = int64_t{row} * topk + k;
  int32_t id = -1;
  float weight = 0;
  if (is_filled(a, row)) {
    const int32_t given = __ldcg(a.ids + slot);
    if (is_expert(a.shape, given)) id = given, weight = __ldcg(a.weights + slot);
  }
  for (int r = static_cast<int>(threadIdx.x) / 32; r < a.group.size; r += kWarps) {
    lane_ids(a, r, lane)[k] = id;
    lane_weights(a, r, lane)[k] = weight;
  }
}

template <A2aRowFormat kFormat>
__global__ void __launch_bounds__(kThreads) send_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  const Work& work = args.work;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  for_parts(work, [&](const Part& part) {
    if (part.row < a.num_own) send_part<kFormat>(a, args.x, part);
    if (part.piece == 0) send_ids(a, part.row);
  });
  __syncthreads();
  raise_flags(o, blockIdx.x);
}

template <A2aRowFormat kFormat>
__global__ void __launch_bounds__(kThreads) wait_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op, Entered{});
  if (o.failed) return;
  if constexpr (kFormat == A2aRowFormat::kBf16) {
    wait_for_flags(o, args.num_senders);
  } else {
    const auto decode_from = [&](int source) {
      for_parts(args.work, [&](Part part) {
        part.row += source * static_cast<int>(a.num_tokens);
        decode_row<kFormat>(a, part, args.decoded);
      });
    };
    decode_from(a.group.rank);  // while the peers' rows are under way
    wait_for_flag(o, blockIdx.x);
    for (int source = 0; source < a.group.size; ++source)
      if (source != a.group.rank) decode_from(source);
  }
}

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
template <class T, class Y>
__device__ void return_results(const A2aRound& a, const A2aResults& from, const Part& part,
                               const Lanes& lanes) {
  const int64_t hidden = a.shape.hidden_size;
  const int warp = static_cast<int>(threadIdx.x) / 32, me = a.group.rank;
  if (a.shape.slots_return) {
    for (int i = warp; i < lanes.num_results; i += kWarps) {
      const int s = lanes.results[i] / kMaxSlots, k = lanes.results[i] % kMaxSlots;
      const Y* const row = rows_of<Y>(from) + lanes.slots[s].rows[k] * hidden;
      T* const to = result_of<T>(a, s, part.row, k);
      for_strided<32>(
          part.begin + static_cast<int>(threadIdx.x) % 32, part.end, [&](int v) { return load_raw(row, v); },
          [] {}, [&](int v, const Raw<Y>& raw) { store_piece(to + v * kColumns, to_piece(raw)); });
    }
    return;
  }
  for (int i = 0; i < lanes.num_results; ++i) {
    const int s = lanes.results[i];
    T* const to = result_of<T>(a, s, part.row, __popc(lanes.ranks[s] & ((1u << me) - 1)));
    for (int v = part.begin + static_cast<int>(threadIdx.x); v < part.end; v += kThreads)
      store_piece(to + v * kColumns, local_sum<Y>(a, from, lanes.slots[s], s * a.num_tokens + part.row, v));
  }
}

// The slots of a token of this rank, in shared memory. With slots_return, those whose results come from other
// ranks have kReturned.
struct OwnToken {
  Slots slots;
  uint32_t ranks;  // bits: the ranks with one of the token's experts
};
// Called by the whole block.
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
template <class T, class Y>
__device__ __forceinline__ RowPiece sum_of_slots(const A2aRound& a, const A2aResults& from, int token,
                                                 const Slots& slots, int vector) {
  const auto local = [&](int64_t row) { return rows_of<Y>(from) + row * a.shape.hidden_size; };
  const auto returned = [&](int k) { return result_of<T>(a, a.group.rank, token, k); };
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
template <class T, class Y>
__device__ __forceinline__ RowPiece sum_of_ranks(const A2aRound& a, const A2aResults& from, int token,
                                                 const OwnToken& own, int vector) {
  const int me = a.group.rank;
  RowPiece sum{};
  int index = 0;
  for (uint32_t ranks = own.ranks; ranks != 0; ranks &= ranks - 1, ++index) {
    const bool is_own = __ffs(ranks) - 1 == me;
    add_scaled(sum, 1,
               is_own ? rounded(local_sum<Y>(a, from, own.slots, me * a.num_tokens + token, vector), T{})
                      : to_piece(load_raw(result_of<T>(a, me, token, index), vector)));
  }
  return sum;
}

// out += the sum of the results of part.row, a token of this rank.
template <class T, class Y>
__device__ void add_results(const A2aRound& a, const A2aResults& from, const Part& part, const OwnToken& own,
                            float* out) {
  float* const to = out + part.row * a.shape.hidden_size;
  for (int v = part.begin + static_cast<int>(threadIdx.x); v < part.end; v += kThreads) {
    RowPiece result = to_piece(load_raw(to, v));
    add_scaled(result, 1,
               a.shape.slots_return ? sum_of_slots<T, Y>(a, from, part.row, own.slots, v)
                                    : sum_of_ranks<T, Y>(a, from, part.row, own, v));
    store_piece(to + v * kColumns, result);
  }
}

// A block returns and adds the same parts on every rank, so that it waits only for its peers' blocks of the
// same index.
template <class T, class Y>
__global__ void __launch_bounds__(kThreads, 2) combine_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  const Work& work = args.work;
  __shared__ Lanes lanes;
  __shared__ OwnToken own;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row = first_row(work);
  const LaneSlot first = row < work.rows ? load_slot(a, args.results, row, warp) : LaneSlot{};
  const Operation o(a.group, a.op);  // reads the epoch while the slots are under way
  if (o.failed) return;
  for_parts(work, [&](const Part& part) {
    load_lanes(a, args.results, part.row,
               part.row == row ? first : load_slot(a, args.results, part.row, warp), lanes);
    return_results<T, Y>(a, args.results, part, lanes);
  });
  __syncthreads();
  raise_flags(o, blockIdx.x);
  if (is_filled(a, row)) load_own_token(a, args.results, row, own);  // during the wait
  wait_for_flag(o, blockIdx.x);
  for_parts(work, [&](const Part& part) {
    if (!is_filled(a, part.row)) return;
    if (part.row != row) load_own_token(a, args.results, part.row, own);
    add_results<T, Y>(a, args.results, part, own, args.out);
  });
}

LaunchShape shape_of(const Work& work) { return {dim3(static_cast<unsigned>(work.blocks)), dim3(kThreads)}; }

void check(const A2aRound& a) {
  FP4MOE_CHECK(a.shape.hidden_size % kColumns == 0 && a.shape.top_k <= kMaxSlots && a.num_own <= a.num_tokens,
               "an exchange with num_own=" + std::to_string(a.num_own) +
                   ", num_tokens=" + std::to_string(a.num_tokens) +
                   ", H=" + std::to_string(a.shape.hidden_size) + ", K=" + std::to_string(a.shape.top_k));
}

void send(const A2aRound& a, const bf16* x) {
  check(a);
  const Work work = send_work(a);
  const Args args{.round = a, .work = work, .x = x};
  switch (a.shape.row_format) {
    case A2aRowFormat::kBf16:
      return launch("a2a_send", send_kernel<A2aRowFormat::kBf16>, shape_of(work), args);
    case A2aRowFormat::kFp8:
      return launch("a2a_send_fp8", send_kernel<A2aRowFormat::kFp8>, shape_of(work), args);
    case A2aRowFormat::kNvfp4:
      return launch("a2a_send_nvfp4", send_kernel<A2aRowFormat::kNvfp4>, shape_of(work), args);
  }
}

void wait(const A2aRound& a, const A2aDecoded& decoded) {
  const bool decodes = a.shape.row_format != A2aRowFormat::kBf16;
  FP4MOE_CHECK(decodes == (decoded.rows != nullptr), "rows are decoded unless they are bf16");
  const Work sent = send_work(a);
  const Args args{
      .round = a, .work = decodes ? sent : Work{.rows = 0}, .num_senders = sent.blocks, .decoded = decoded};
  const Work& work = args.work;
  switch (a.shape.row_format) {
    case A2aRowFormat::kBf16:
      return launch("a2a_wait", wait_kernel<A2aRowFormat::kBf16>, shape_of(work), args);
    case A2aRowFormat::kFp8:
      return launch("a2a_wait_fp8", wait_kernel<A2aRowFormat::kFp8>, shape_of(work), args);
    case A2aRowFormat::kNvfp4:
      return launch("a2a_wait_nvfp4", wait_kernel<A2aRowFormat::kNvfp4>, shape_of(work), args);
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

void combine(const A2aRound& a, const A2aResults& results, float* out) {
  check(a);
  FP4MOE_CHECK(!a.shape.slots_return || results.sums == nullptr, "slots_return takes rows, not sums");
  const Work work = combine_work(a);
  with_result_type(a.shape, [&](auto type) {
    using T = decltype(type);
    launch("a2a_combine", results.y != nullptr ? combine_kernel<T, float> : combine_kernel<T, bf16>,
           shape_of(work), Args{.round = a, .work = work, .results = results, .out = out});
  });
}

struct ReplicaArgs {
  A2aReplicas table;
  const int32_t* ids = nullptr;
  int64_t num_slots = 0, top_k = 0;
  int32_t* out = nullptr;
};

__global__ void __launch_bounds__(kThreads) replicas_kernel(const __grid_constant__ ReplicaArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= a.num_slots) return;
  const int32_t id = a.ids[slot];
  if (id < 0 || id >= a.table.num_experts) {
    a.out[slot] = -1;
    return;
  }
  const int32_t first = a.table.first[id];
  const int64_t count = a.table.first[id + 1] - first;
  a.out[slot] = a.table.replicas[first + (slot / a.top_k + id + a.table.rank) % count];
}

void choose_replicas(const A2aReplicas& table, const int32_t* ids, int64_t num_tokens, int64_t top_k,
                     int32_t* out) {
  const int64_t num_slots = num_tokens * top_k;
  const auto blocks = static_cast<unsigned>((num_slots + kThreads - 1) / kThreads);
  launch("a2a_choose_replicas", replicas_kernel, {.grid = dim3(blocks), .block = dim3(kThreads)},
         ReplicaArgs{table, ids, num_slots, top_k, out});
}

void clear(float* out, int64_t n) {
  cudaMemsetAsync(out, 0, static_cast<size_t>(n) * sizeof(float), current_stream().handle());
  current_stream().check_launch("clear");
}

}  // namespace

int a2a_blocks_per_sm() {
  int least = kMaxCommBlocks;
  for (const auto& kernel :
       {wait_kernel<A2aRowFormat::kBf16>, wait_kernel<A2aRowFormat::kFp8>, wait_kernel<A2aRowFormat::kNvfp4>,
        combine_kernel<float, bf16>, combine_kernel<bf16, bf16>, combine_kernel<E4m3, bf16>,
        combine_kernel<float, float>, combine_kernel<bf16, float>, combine_kernel<E4m3, float>}) {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0);
    least = std::min(least, blocks);
  }
  return least;
}

}  // namespace fp4moe::cuda

namespace fp4moe {

const DeviceA2aOps* cuda_a2a_ops() {
  static constexpr DeviceA2aOps ops{.send = cuda::send,
                                    .wait = cuda::wait,
                                    .combine = cuda::combine,
                                    .clear = cuda::clear,
                                    .choose_replicas = cuda::choose_replicas};
  return &ops;
}

}  // namespace fp4moe
