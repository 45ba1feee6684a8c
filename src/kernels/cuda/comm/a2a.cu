// Token rows to the ranks of their experts, and results back, for the GPUs of a group.
//
// Computes:  send: rows, ids and weights into the lanes of the ranks. give_back: the lanes' results into
//            places at the tokens' ranks. add: out [t] += a token's results.
// Shapes:    H a multiple of 8, K up to 32; any T, any number of ranks up to kMaxGroupRanks.
// Bytes:     send: 2 H to each rank with one of the token's experts, 8 K to all. give_back: as much, or K
//            rows a token. add: reads what returned, reads and writes 4 H.
// Bound:     the links for many tokens; for few the latency of a store and of a flag's poll.
// Numerics:  rows are copied. A sum over slots uses fma in top-k order; a sum over ranks adds in rank order.
#include <cuda_bf16.h>

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/device_a2a.h"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256, kColumns = 8;

// A round's work: `rows` rows in `pieces` parts each.
struct Work {
  int64_t rows = 0;
  int pieces = 1, blocks = 1;
};

// Few rows are cut, so that more blocks share them. The same on all ranks, which wait for every block's flag.
Work work_of(const A2aRound& round, int64_t rows) {
  const int64_t vectors = round.shape.hidden_size / kColumns, most = round.group.max_blocks;
  Work work{.rows = rows};
  work.pieces = static_cast<int>(
      std::clamp<int64_t>(most / std::max<int64_t>(rows, 1), 1, (vectors + kThreads - 1) / kThreads));
  work.blocks = static_cast<int>(std::clamp<int64_t>(rows * work.pieces, 1, most));
  return work;
}
Work send_work(const A2aRound& round) { return work_of(round, round.num_tokens); }
Work return_work(const A2aRound& round) { return work_of(round, round.group.size * round.num_tokens); }

struct Part {
  int64_t row;
  int piece;
  int64_t begin, end;  // vectors of kColumns columns
};
__device__ __forceinline__ Part part_of(const Work& work, const A2aShape& shape, int64_t item) {
  const int64_t vectors = shape.hidden_size / kColumns, row = item / work.pieces;
  const int piece = static_cast<int>(item - row * work.pieces);
  return {row, piece, vectors * piece / work.pieces, vectors * (piece + 1) / work.pieces};
}

template <class T>
__device__ __forceinline__ T* exchange_memory(const CommGroup& group, int rank, int64_t offset) {
  return reinterpret_cast<T*>(group.regions[rank] + group.layout.exchange + offset);
}
__device__ __forceinline__ bf16* lane_row(const A2aRound& a, int rank, int64_t lane) {
  return exchange_memory<bf16>(a.group, rank, a.area.rows) + lane * a.shape.hidden_size;
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
// The rank of an expert, which may be outside the group while it rehearses.
__device__ __forceinline__ int rank_of(const A2aShape& shape, int32_t id) {
  return id / static_cast<int32_t>(shape.experts_per_rank);
}
// The ranks that get the row of a token with these experts, as bits.
__device__ __forceinline__ uint32_t ranks_of(const A2aRound& a, const int32_t* ids) {
  const uint32_t all = (1u << a.group.size) - 1;
  uint32_t ranks = 0;
  for (int k = 0; k < static_cast<int>(a.shape.top_k); ++k)
    if (is_expert(a.shape, ids[k]))
      ranks |= a.shape.experts_per_rank == 0 ? all : 1u << rank_of(a.shape, ids[k]);
  return ranks & all;
}

struct Args {
  A2aRound round;
  Work work;
  int num_senders = 0;  // blocks of each peer's launch that this one waits for
  const bf16* x = nullptr;
  A2aResults results;
  float* out = nullptr;
};

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
      const auto* const from = reinterpret_cast<const uint4*>(args.x + part.row * a.shape.hidden_size);
      for (int64_t v = part.begin + threadIdx.x; v < part.end; v += kThreads) {
        const uint4 words = __ldcg(from + v);
        for (uint32_t left = ranks; left != 0; left &= left - 1)
          reinterpret_cast<uint4*>(lane_row(a, __ffs(left) - 1, lane))[v] = words;
      }
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

__global__ void __launch_bounds__(kThreads) wait_kernel(const __grid_constant__ Args args) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(args.round.group, args.round.op, Entered{});
  if (!o.failed) wait_for_flags(o, args.num_senders);
}

struct Piece {
  float v[kColumns];
};
__device__ __forceinline__ Piece load_piece(const float* p, int64_t vector) {
  const auto* const v = reinterpret_cast<const float4*>(p) + 2 * vector;
  const float4 a = __ldcg(v), b = __ldcg(v + 1);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
__device__ __forceinline__ Piece load_piece(const bf16* p, int64_t vector) {
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(p) + vector);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  Piece piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    piece.v[2 * i] = __uint_as_float(words[i] << 16);
    piece.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
  }
  return piece;
}
__device__ __forceinline__ void store_piece(float* p, int64_t vector, const Piece& s) {
  auto* const v = reinterpret_cast<float4*>(p) + 2 * vector;
  v[0] = {s.v[0], s.v[1], s.v[2], s.v[3]};
  v[1] = {s.v[4], s.v[5], s.v[6], s.v[7]};
}
__device__ __forceinline__ void store_piece(bf16* p, int64_t vector, const Piece& s) {
  __nv_bfloat162 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(s.v[2 * i], s.v[2 * i + 1]);
  reinterpret_cast<uint4*>(p)[vector] = *reinterpret_cast<const uint4*>(pairs);
}
__device__ __forceinline__ void add_scaled(Piece& sum, float weight, const Piece& piece) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum.v[i] = fmaf(weight, piece.v[i], sum.v[i]);
}

// Result `part` of a token, at its rank.
template <class T>
__device__ __forceinline__ T* result_of(const A2aRound& a, int rank, int64_t token, int64_t part) {
  const int64_t place = token * a.shape.parts(a.group.size) + part;
  return exchange_memory<T>(a.group, rank, a.area.returns) + place * a.shape.hidden_size;
}
__device__ __forceinline__ Piece load_result(const A2aResults& from, int64_t row, int64_t hidden,
                                             int64_t vector) {
  return from.y_bf16 != nullptr ? load_piece(from.y_bf16 + row * hidden, vector)
                                : load_piece(from.y + row * hidden, vector);
}

// A lane's results of its slots, each to its place.
__device__ void return_slots(const A2aRound& a, const A2aResults& from, const Part& part, int source,
                             int64_t token) {
  const int topk = static_cast<int>(a.shape.top_k);
  for (int k = 0; k < topk; ++k) {
    const int64_t row = from.row_of_slot[part.row * topk + k];
    if (row < 0) continue;
    bf16* const to = result_of<bf16>(a, source, token, k);
    for (int64_t v = part.begin + threadIdx.x; v < part.end; v += kThreads)
      store_piece(to, v, load_result(from, row, a.shape.hidden_size, v));
  }
}

// A lane's weighted sum, to this rank's place among the token's ranks.
template <class T>
__device__ void return_sum(const A2aRound& a, const A2aResults& from, const Part& part, int source,
                           int64_t token) {
  const int topk = static_cast<int>(a.shape.top_k), me = a.group.rank;
  const uint32_t ranks = ranks_of(a, lane_ids(a, me, part.row));
  if ((ranks >> me & 1) == 0) return;
  const int index = a.shape.experts_per_rank == 0 ? me : __popc(ranks & ((1u << me) - 1));
  T* const to = result_of<T>(a, source, token, index);
  const float* const weights = lane_weights(a, me, part.row);
  for (int64_t v = part.begin + threadIdx.x; v < part.end; v += kThreads) {
    Piece sum{};
    if (from.sums != nullptr) {
      sum = load_piece(from.sums + part.row * a.shape.hidden_size, v);
    } else {
      for (int k = 0; k < topk; ++k)
        if (const int64_t row = from.row_of_slot[part.row * topk + k]; row >= 0)
          add_scaled(sum, weights[k], load_result(from, row, a.shape.hidden_size, v));
    }
    store_piece(to, v, sum);
  }
}

__global__ void __launch_bounds__(kThreads) return_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  const Work& work = args.work;
  const A2aResults& from = args.results;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  for (int64_t item = blockIdx.x; item < work.rows * work.pieces; item += gridDim.x) {
    const Part part = part_of(work, a.shape, item);
    const int source = static_cast<int>(part.row / a.num_tokens);
    const int64_t token = part.row - source * a.num_tokens;
    if (a.shape.slots_return)
      return_slots(a, from, part, source, token);
    else if (a.shape.f32_sums)
      return_sum<float>(a, from, part, source, token);
    else
      return_sum<bf16>(a, from, part, source, token);
  }
  __syncthreads();
  raise_flags(o);
}

template <class T>
__device__ Piece sum_of_ranks(const A2aRound& a, int64_t token, uint32_t ranks, int64_t vector) {
  Piece sum{};
  int index = 0;
  for (int r = 0; r < a.group.size; ++r)
    if (ranks >> r & 1) add_scaled(sum, 1, load_piece(result_of<T>(a, a.group.rank, token, index++), vector));
  return sum;
}

__device__ Piece sum_of_slots(const A2aRound& a, int64_t token, int64_t vector) {
  const int topk = static_cast<int>(a.shape.top_k);
  Piece sum{};
  for (int k = 0; k < topk; ++k) {
    const int32_t id = a.ids[token * topk + k];
    if (is_expert(a.shape, id) && rank_of(a.shape, id) < a.group.size)
      add_scaled(sum, a.weights[token * topk + k],
                 load_piece(result_of<bf16>(a, a.group.rank, token, k), vector));
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) add_kernel(const __grid_constant__ Args args) {
  const A2aRound& a = args.round;
  const Work& work = args.work;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op, Entered{});
  if (o.failed) return;
  wait_for_flags(o, args.num_senders);
  for (int64_t item = blockIdx.x; item < work.rows * work.pieces; item += gridDim.x) {
    const Part part = part_of(work, a.shape, item);
    const int64_t token = part.row;
    if (!is_filled(a, token)) continue;
    const uint32_t ranks = ranks_of(a, a.ids + token * a.shape.top_k);
    float* const to = args.out + token * a.shape.hidden_size;
    for (int64_t v = part.begin + threadIdx.x; v < part.end; v += kThreads) {
      const Piece sum = a.shape.slots_return ? sum_of_slots(a, token, v)
                        : a.shape.f32_sums   ? sum_of_ranks<float>(a, token, ranks, v)
                                             : sum_of_ranks<bf16>(a, token, ranks, v);
      Piece result = load_piece(to, v);
      add_scaled(result, 1, sum);
      store_piece(to, v, result);
    }
  }
}

LaunchShape shape_of(const Work& work) { return {dim3(static_cast<unsigned>(work.blocks)), dim3(kThreads)}; }

void check(const A2aRound& a) {
  FP4MOE_CHECK(a.shape.hidden_size % kColumns == 0 && a.shape.top_k <= 32 && a.num_own <= a.num_tokens,
               "an exchange of " + std::to_string(a.num_own) + " of " + std::to_string(a.num_tokens) +
                   " tokens, H=" + std::to_string(a.shape.hidden_size) +
                   ", K=" + std::to_string(a.shape.top_k));
}

void send(const A2aRound& a, const bf16* x) {
  check(a);
  const Work work = send_work(a);
  launch("a2a_send", send_kernel, shape_of(work), Args{.round = a, .work = work, .x = x});
}

void wait(const A2aRound& a) {
  launch("a2a_wait", wait_kernel, {dim3(1), dim3(kThreads)},
         Args{.round = a, .num_senders = send_work(a).blocks});
}

void give_back(const A2aRound& a, const A2aResults& results) {
  check(a);
  FP4MOE_CHECK(!a.shape.slots_return || results.sums == nullptr, "sums where slots return");
  const Work work = return_work(a);
  launch("a2a_return", return_kernel, shape_of(work), Args{.round = a, .work = work, .results = results});
}

void add(const A2aRound& a, float* out) {
  const Work work = send_work(a);
  launch("a2a_add", add_kernel, shape_of(work),
         Args{.round = a, .work = work, .num_senders = return_work(a).blocks, .out = out});
}

void clear(float* out, int64_t n) {
  cudaMemsetAsync(out, 0, static_cast<size_t>(n) * sizeof(float), current_stream().handle());
  current_stream().check_launch("clear");
}

}  // namespace

int a2a_blocks_per_sm() {
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add_kernel, kThreads, 0);
  return blocks;
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
