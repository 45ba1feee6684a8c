// Sends token rows to the ranks of their experts and results back, between the GPUs of a group.
//
// Computes:  send: stores rows, ids and weights in the ranks' lanes. give_back: stores the lanes' results in
//            places on the tokens' ranks. add: out [t] += the token's results.
// Shapes:    H a multiple of 8, K up to 32; any T, any number of ranks up to kMaxGroupRanks.
// Bytes:     per token. send: 2 H to each rank with one of the token's experts, 8 K to all ranks. give_back:
//            one result from each such rank, or K rows. add: reads the results, reads and writes 4 H.
// Bound:     the links for many tokens; for few tokens, the latency of a store and of polling a flag.
// Numerics:  rows are copied. A sum over slots uses fma in top-k order; a sum over ranks adds in rank order.
#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/comm/a2a_rows.cuh"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/device_a2a.h"

namespace fp4moe::cuda {
namespace {

// A round's work: `rows` rows in `pieces` parts each, which begin at multiples of `unit` vectors of kColumns
// columns.
struct Work {
  int64_t rows = 0;
  int pieces = 1, blocks = 1, unit = 1;
};

// Cuts rows into pieces if there are few rows, so that more blocks share them. The result is the same on all
// ranks, which wait for every block's flag.
Work work_of(const A2aShape& shape, int64_t rows, int most_blocks) {
  const int64_t vectors = shape.hidden_size / kColumns;
  Work work{.rows = rows};
  work.pieces = static_cast<int>(
      std::clamp<int64_t>(most_blocks / std::max<int64_t>(rows, 1), 1, (vectors + kThreads - 1) / kThreads));
  work.blocks = static_cast<int>(std::clamp<int64_t>(rows * work.pieces, 1, most_blocks));
  return work;
}
// Blocks that do not wait need not be resident at once.
Work send_work(const A2aRound& round) {
  Work work = work_of(round.shape, round.num_tokens, kMaxCommBlocks);
  if (round.shape.row_format != A2aRowFormat::kBf16) work.unit = kGroupVectors;
  return work;
}
Work return_work(const A2aRound& round) {
  const int64_t slots = round.shape.slots_return ? round.shape.top_k : 1;
  return work_of(round.shape, round.group.size * round.num_tokens * slots, kMaxCommBlocks);
}
Work decode_work(const A2aRound& round) {
  return work_of(round.shape, round.group.size * round.num_tokens, round.group.max_blocks);
}
Work add_work(const A2aRound& round) {
  return work_of(round.shape, round.num_tokens, round.group.max_blocks);
}

__device__ __forceinline__ Part part_of(const Work& work, const A2aShape& shape, int64_t item) {
  const int64_t vectors = shape.hidden_size / kColumns, units = (vectors + work.unit - 1) / work.unit;
  const int64_t row = item / work.pieces;
  const int piece = static_cast<int>(item - row * work.pieces);
  return {row, piece, units * piece / work.pieces * work.unit,
          min(units * (piece + 1) / work.pieces * work.unit, vectors)};
}

struct Args {
  A2aRound round;
  Work work;
  int num_senders = 0;  // blocks of each peer's launch for which this launch waits
  const bf16* x = nullptr;
  A2aDecoded decoded;
  A2aResults results;
  float* out = nullptr;
};

template <A2aRowFormat kFormat>
__global__ void __launch_bounds__(kThreads) send_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  const Work& work = args.work;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  const int size = a.group.size, topk = static_cast<int>(a.shape.top_k);
  for (int64_t item = blockIdx.x; item < work.rows * work.pieces; item += gridDim.x) {
    const Part part = part_of(work, a.shape, item);
    const bool filled = is_filled(a, part.row);
    const int32_t* const ids = a.ids + part.row * topk;
    const int64_t lane = a.group.rank * a.num_tokens + part.row;
    if (const uint32_t ranks = filled ? ranks_of(a, ids) : 0; ranks != 0) {
      const bf16* const from = args.x + part.row * a.shape.hidden_size;
      if constexpr (kFormat == A2aRowFormat::kBf16)
        copy_row(a, part, from, ranks, lane);
      else
        encode_row<kFormat>(a, part, from, ranks, lane);
    }
    if (part.piece != 0) continue;
    for (int i = threadIdx.x; i < size * topk; i += kThreads) {
      const int r = i / topk, k = i % topk;
      const bool valid = filled && is_expert(a.shape, ids[k]);
      lane_ids(a, r, lane)[k] = valid ? ids[k] : -1;
      lane_weights(a, r, lane)[k] = valid ? a.weights[part.row * topk + k] : 0;
    }
  }
  __syncthreads();
  raise_flags(o);
}

template <A2aRowFormat kFormat>
__global__ void __launch_bounds__(kThreads) wait_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op, Entered{});
  if (o.failed) return;
  wait_for_flags(o, args.num_senders);
  if constexpr (kFormat != A2aRowFormat::kBf16)
    for (int64_t item = blockIdx.x; item < args.work.rows * args.work.pieces; item += gridDim.x)
      decode_row<kFormat>(a, part_of(args.work, a.shape, item), args.decoded);
}

__device__ __forceinline__ RowPiece load_result(const A2aResults& from, int64_t row, int64_t hidden,
                                                int64_t vector) {
  return from.y_bf16 != nullptr ? load_piece(from.y_bf16 + row * hidden, vector)
                                : load_piece(from.y + row * hidden, vector);
}

// Stores the result of a slot, whose index among the lanes' is part.row, in its place.
template <class T>
__device__ void return_slot(const A2aRound& a, const A2aResults& from, const Part& part) {
  const int64_t row = __ldcg(from.row_of_slot + part.row);
  if (row < 0) return;
  const int64_t lane = part.row / a.shape.top_k, slot = part.row - lane * a.shape.top_k;
  const int source = static_cast<int>(lane / a.num_tokens);
  T* const to = result_of<T>(a, source, lane - source * a.num_tokens, slot);
  for_vectors(
      part, [&](int64_t v) { return load_result(from, row, a.shape.hidden_size, v); },
      [&](int64_t v, const RowPiece& piece) { store_piece(to + v * kColumns, piece); });
}

// Stores the weighted sum of lane part.row in this rank's place among the token's ranks.
template <class T>
__device__ void return_sum(const A2aRound& a, const A2aResults& from, const Part& part, Slots& slots) {
  const int topk = static_cast<int>(a.shape.top_k), me = a.group.rank, k = static_cast<int>(threadIdx.x);
  const int64_t hidden = a.shape.hidden_size;
  __syncthreads();  // all threads have read the slots of the row before
  if (from.sums == nullptr && k < topk) {
    slots.rows[k] = __ldcg(from.row_of_slot + part.row * topk + k);
    slots.weights[k] = __ldcg(lane_weights(a, me, part.row) + k);
  }
  const uint32_t ranks = ranks_of(a, lane_ids(a, me, part.row));
  __syncthreads();
  if ((ranks >> me & 1) == 0) return;
  const int index = a.shape.experts_per_rank == 0 ? me : __popc(ranks & ((1u << me) - 1));
  const int source = static_cast<int>(part.row / a.num_tokens);
  T* const to = result_of<T>(a, source, part.row - source * a.num_tokens, index);
  for (int64_t v = part.begin + threadIdx.x; v < part.end; v += kThreads)
    store_piece(to + v * kColumns, from.sums != nullptr ? load_piece(from.sums + part.row * hidden, v)
                                                        : weighted_sum(slots, topk, [&](int64_t row) {
                                                            return load_result(from, row, hidden, v);
                                                          }));
}

template <class T>
__global__ void __launch_bounds__(kThreads) return_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  const Work& work = args.work;
  __shared__ Slots slots;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  const int64_t items = work.rows * work.pieces, of_rank = items / a.group.size;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    // Starts with the next rank's lanes and ends with its own, which need no link.
    const Part part = part_of(work, a.shape, (item + (a.group.rank + 1) * of_rank) % items);
    if (a.shape.slots_return)
      return_slot<T>(a, args.results, part);
    else
      return_sum<T>(a, args.results, part, slots);
  }
  __syncthreads();
  raise_flags(o);
}

// Loads the slots of a token of this rank. A slot without an expert on a rank of the group gets row -1.
__device__ __forceinline__ void load_slots(const A2aRound& a, int64_t token, Slots& slots) {
  const int topk = static_cast<int>(a.shape.top_k), k = static_cast<int>(threadIdx.x);
  if (k >= topk) return;
  const int32_t id = __ldcg(a.ids + token * topk + k);
  slots.rows[k] = is_expert(a.shape, id) && rank_of(a.shape, id) < a.group.size ? k : -1;
  slots.weights[k] = __ldcg(a.weights + token * topk + k);
}

// The sum of a token's results. With slots_return, `slots` has its slots; otherwise `num_results` ranks have
// returned one each.
template <class T>
__device__ RowPiece sum_of_results(const A2aRound& a, int64_t token, const Slots& slots, int num_results,
                                   int64_t vector) {
  const auto load = [&](int64_t part) {
    return load_piece(result_of<T>(a, a.group.rank, token, part), vector);
  };
  if (a.shape.slots_return) return weighted_sum(slots, static_cast<int>(a.shape.top_k), load);
  RowPiece sum{};
#pragma unroll 4
  for (int i = 0; i < num_results; ++i) add_scaled(sum, 1, load(i));
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  const Work& work = args.work;
  __shared__ Slots slots;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op, Entered{});
  if (o.failed) return;
  const bool has_slots = a.shape.slots_return;
  const int64_t first = blockIdx.x, first_token = first / work.pieces;
  if (has_slots && is_filled(a, first_token)) load_slots(a, first_token, slots);  // during the wait
  wait_for_flags(o, args.num_senders);
  for (int64_t item = first; item < work.rows * work.pieces; item += gridDim.x) {
    const Part part = part_of(work, a.shape, item);
    const int64_t token = part.row;
    if (!is_filled(a, token)) continue;
    if (has_slots && item != first) {
      __syncthreads();  // all threads have read the slots of the token before
      load_slots(a, token, slots);
      __syncthreads();
    }
    const int num_results = has_slots ? 0 : __popc(ranks_of(a, a.ids + token * a.shape.top_k));
    float* const to = args.out + token * a.shape.hidden_size;
    for (int64_t v = part.begin + threadIdx.x; v < part.end; v += kThreads) {
      RowPiece result = load_piece(to, v);
      add_scaled(result, 1, sum_of_results<T>(a, token, slots, num_results, v));
      store_piece(to + v * kColumns, result);
    }
  }
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
  const Work work = decodes ? decode_work(a) : Work{.rows = 0};
  const Args args{.round = a, .work = work, .num_senders = send_work(a).blocks, .decoded = decoded};
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

void give_back(const A2aRound& a, const A2aResults& results) {
  check(a);
  FP4MOE_CHECK(!a.shape.slots_return || results.sums == nullptr, "slots_return takes rows, not sums");
  const Work work = return_work(a);
  with_result_type(a.shape, [&](auto type) {
    launch("a2a_return", return_kernel<decltype(type)>, shape_of(work),
           Args{.round = a, .work = work, .results = results});
  });
}

void add(const A2aRound& a, float* out) {
  const Work work = add_work(a);
  with_result_type(a.shape, [&](auto type) {
    launch("a2a_add", add_kernel<decltype(type)>, shape_of(work),
           Args{.round = a, .work = work, .num_senders = return_work(a).blocks, .out = out});
  });
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
        add_kernel<float>, add_kernel<bf16>, add_kernel<E4m3>}) {
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
                                    .give_back = cuda::give_back,
                                    .add = cuda::add,
                                    .clear = cuda::clear};
  return &ops;
}

}  // namespace fp4moe
