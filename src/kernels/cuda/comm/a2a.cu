// Sends token rows to the ranks of their experts and results back, between the GPUs of a group.
//
// Computes:  send: stores rows, ids and weights in the ranks' lanes. combine: stores the lanes' results in
//            places on the tokens' ranks; out [t] += the results of token t. choose_replicas: maps ids.
// Shapes:    H a multiple of 8, K up to 32; any T, any number of ranks up to kMaxGroupRanks.
// Bytes:     per token. send: 2 H to each rank with one of its experts, 8 K to all ranks. combine: one result
//            from each such rank, or K rows; then reads them, and reads and writes 4 H. A rank's own
//            results are not copied. If the experts' kernel has returned the results, combine only adds them.
// Bound:     the links for many tokens; for few tokens, the latency of a store and of polling a flag.
// Numerics:  rows are copied. A sum over slots uses fma in top-k order; a sum over ranks adds in rank order.
#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/comm/a2a_results.cuh"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/device_a2a.h"

namespace fp4moe::cuda {
namespace {

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
__global__ void __launch_bounds__(kThreads) send_kernel(const __grid_constant__ A2aArgs args) {
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
__global__ void __launch_bounds__(kThreads) wait_kernel(const __grid_constant__ A2aArgs args) {
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

// A block returns and adds the same parts on every rank, so that it waits only for its peers' blocks of the
// same index.
template <class T, class Y>
__global__ void __launch_bounds__(kThreads, 2) combine_kernel(const __grid_constant__ A2aArgs args) {
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
    return_results<SharedPlaces, T, Y>(a, args.results, part, lanes);
  });
  __syncthreads();
  raise_flags(o, blockIdx.x);
  if (is_filled(a, row)) load_own_token<SharedPlaces>(a, args.results, row, own);  // during the wait
  wait_for_flag(o, blockIdx.x);
  for_parts(work, [&](const Part& part) {
    if (!is_filled(a, part.row)) return;
    if (part.row != row) load_own_token<SharedPlaces>(a, args.results, part.row, own);
    add_results<SharedPlaces, T, Y>(a, args.results, part, own, args.out);
  });
}

// The slots of a part's token, which have returned: slot k in lane k of each warp.
struct ReturnedSlots {
  float weight = 0;
  uint32_t is_added = 0;  // bits: the slots of an expert

  __device__ __forceinline__ ReturnedSlots(const A2aRound& a, int token) {
    const int k = static_cast<int>(threadIdx.x) % 32, topk = static_cast<int>(a.shape.top_k);
    const bool is_slot = k < topk && is_filled(a, token);
    const int64_t slot = int64_t{token} * topk + k;
    const int32_t id = is_slot ? __ldcg(a.ids + slot) : -1;
    if (is_slot) weight = __ldcg(a.weights + slot);
    is_added = __ballot_sync(~0u, is_expert(a.shape, id) && rank_of(a.shape, id) < a.group.size);
  }
};

// The sum of vector v of a token's slots, in top-k order. Called by whole warps.
__device__ __forceinline__ RowPiece sum_of_returned(const A2aRound& a, int token, const ReturnedSlots& slots,
                                                    int v, bool is_inside) {
  constexpr int kAtOnce = 4;
  const int topk = static_cast<int>(a.shape.top_k);
  RowPiece sum{};
  for (int first = 0; first < topk; first += kAtOnce) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (is_inside && (slots.is_added >> (first + j) & 1) != 0)
        raw[j] = load_raw(result_of<bf16>(a, a.group.rank, token, first + j), v);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float weight = __shfl_sync(~0u, slots.weight, first + j);
      if ((slots.is_added >> (first + j) & 1) != 0) add_scaled(sum, weight, to_piece(raw[j]));
    }
  }
  return sum;
}

// Combines slots whose results have returned. The preceding kernel has stored this rank's results, on all
// ranks, before this kernel passes its wait for it, so that any thread can raise a flag. The peers may run
// combine_kernel.
__global__ void __launch_bounds__(kThreads) add_returned_kernel(const __grid_constant__ A2aArgs args) {
  const A2aRound& a = args.round;
  const Work& work = args.work;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int row = first_row(work), thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const ReturnedSlots first(a, row);
  const Operation o(a.group, a.op);  // reads the epoch while the slots are under way
  if (o.failed) return;
  meet_peers(o, blockIdx.x);
  for_parts(work, [&](const Part& part) {
    const ReturnedSlots slots = part.row == row ? first : ReturnedSlots(a, part.row);
    if (!is_filled(a, part.row)) return;
    float* const to = args.out + part.row * a.shape.hidden_size;
    for (int v = part.begin + thread; v - lane < part.end; v += kThreads) {
      const bool is_inside = v < part.end;
      F32Raw before{};
      if (is_inside) before = load_raw(to, v);
      const RowPiece sum = sum_of_returned(a, part.row, slots, v, is_inside);
      RowPiece result = to_piece(before);
      add_scaled(result, 1, sum);
      if (is_inside) store_piece(to + v * kColumns, result);
    }
  });
}

void check(const A2aRound& a) {
  FP4MOE_CHECK(a.shape.hidden_size % kColumns == 0 && a.shape.top_k <= kMaxSlots && a.num_own <= a.num_tokens,
               "an exchange with num_own=" + std::to_string(a.num_own) +
                   ", num_tokens=" + std::to_string(a.num_tokens) +
                   ", H=" + std::to_string(a.shape.hidden_size) + ", K=" + std::to_string(a.shape.top_k));
}

void launch_send(const A2aRound& a, const bf16* x) {
  const Work work = send_work(a);
  const A2aArgs args{.round = a, .work = work, .x = x};
  switch (a.shape.row_format) {
    case A2aRowFormat::kBf16:
      load_send();
      return launch("a2a_send", send_kernel<A2aRowFormat::kBf16>, shape_of(work), args);
    case A2aRowFormat::kFp8:
      return launch("a2a_send_fp8", send_kernel<A2aRowFormat::kFp8>, shape_of(work), args);
    case A2aRowFormat::kNvfp4:
      return launch("a2a_send_nvfp4", send_kernel<A2aRowFormat::kNvfp4>, shape_of(work), args);
  }
}

// With a plane, the send kernel stores rows only in this rank's lanes, because all regions are its own.
void send(const A2aRound& a, const bf16* x) {
  check(a);
  launch_send(a, x);
  if (a.group.plane != nullptr) staged_send(a);
}

void wait(const A2aRound& a, const A2aDecoded& decoded) {
  const bool decodes = a.shape.row_format != A2aRowFormat::kBf16;
  FP4MOE_CHECK(decodes == (decoded.rows != nullptr), "rows are decoded unless they are bf16");
  if (a.group.plane != nullptr) return staged_wait(a, decoded);
  const Work sent = send_work(a);
  const A2aArgs args{
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

void combine(const A2aRound& a, const A2aResults& results, float* out) {
  check(a);
  FP4MOE_CHECK(!a.shape.slots_return || results.sums == nullptr, "slots_return takes rows, not sums");
  FP4MOE_CHECK(!results.are_returned || (a.shape.allows_returned_rows() && results.row_of_slot == nullptr),
               "these results cannot have returned");
  if (a.group.plane != nullptr) return staged_combine(a, results, out);
  const Work work = combine_work(a);
  if (results.are_returned)
    return launch("a2a_add_returned", add_returned_kernel, shape_of(work),
                  A2aArgs{.round = a, .work = work, .out = out});
  with_result_type(a.shape, [&](auto type) {
    using T = decltype(type);
    launch("a2a_combine", results.y != nullptr ? combine_kernel<T, float> : combine_kernel<T, bf16>,
           shape_of(work), A2aArgs{.round = a, .work = work, .results = results, .out = out});
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

void load_send() { prepare_kernel(send_kernel<A2aRowFormat::kBf16>, {}); }

int send_flags_per_token(const A2aRound& round) {
  const Work work = send_work(round);
  return work.blocks == work.rows * work.pieces ? work.pieces : 0;
}

int a2a_blocks_per_sm() {
  int least = kMaxCommBlocks;
  for (const auto& kernel :
       {wait_kernel<A2aRowFormat::kBf16>, wait_kernel<A2aRowFormat::kFp8>, wait_kernel<A2aRowFormat::kNvfp4>,
        combine_kernel<float, bf16>, combine_kernel<bf16, bf16>, combine_kernel<E4m3, bf16>,
        combine_kernel<float, float>, combine_kernel<bf16, float>, combine_kernel<E4m3, float>,
        add_returned_kernel}) {
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
                                    .send_direct = cuda::send_direct,
                                    .add_direct = cuda::add_direct,
                                    .clear = cuda::clear,
                                    .choose_replicas = cuda::choose_replicas};
  return &ops;
}

}  // namespace fp4moe
