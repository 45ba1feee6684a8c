// The first and the last kernel of a direct round, between which the experts' kernel waits for the rows and
// stores its sums (few_tokens.cu).
//
// Computes:  send_direct: stores rows, ids and weights in the lanes of all ranks. add_direct: out [t] += the
//            sums of all ranks for token t.
// Shapes:    R T <= kDirectLanes, H a multiple of 8.
// Bytes:     per token. send_direct: (2 H + 8 K) R. add_direct: R results, marked again, and 8 H.
// Bound:     the latency of a store to another GPU, once in each direction.
// Numerics:  as in a2a.cu: sums of ranks are added in rank order, each as it returned.
#include <string>
#include <type_traits>

#include "base/check.h"
#include "kernels/cuda/comm/a2a_direct.cuh"
#include "kernels/cuda/comm/a2a_results.cuh"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"

namespace fp4moe::cuda {
namespace {

// A block sends a piece of a row. Each thread sends at most one vector of the piece.
__global__ void __launch_bounds__(kThreads) send_direct_kernel(const __grid_constant__ A2aArgs args) {
  const A2aRound& a = args.round;
  const int thread = static_cast<int>(threadIdx.x), row = first_row(args.work);
  const int piece = static_cast<int>(blockIdx.x) - row * args.work.pieces;
  const int v = piece * args.work.piece_vectors + thread;
  const bool is_inside = thread < args.work.piece_vectors && v < args.work.vectors;
  ptx::grid_dependency_wait();
  // Not before the wait: the experts' kernel reads what the last round's kernels wrote.
  ptx::grid_dependents_launch();
  const DirectSender sender(a);
  uint4 words{};
  if (is_inside && row < a.num_own)
    words = __ldcg(reinterpret_cast<const uint4*>(args.x + row * a.shape.hidden_size) + v);
  if (const int k = thread; piece == 0 && k < static_cast<int>(a.shape.top_k)) {
    const int64_t at = row * a.shape.top_k + k;
    const int32_t id = row < a.num_own ? __ldcg(a.ids + at) : -1;
    const float weight = row < a.num_own ? __ldcg(a.weights + at) : 0;
    sender.store_slot(row, k, is_filled(a, row) && is_expert(a.shape, id), id, weight);
  }
  if (is_inside) sender.store_row(row, v, words);
}

constexpr int kAddThreads = 128;

// Four columns of a result as words.
template <class T>
using ResultWords = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
__device__ __forceinline__ float4 as_floats(const uint4& w) {
  return {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
}
__device__ __forceinline__ float4 as_floats(const uint2& w) {
  return {ptx::low_of_pair(w.x), ptx::high_of_pair(w.x), ptx::low_of_pair(w.y), ptx::high_of_pair(w.y)};
}
__device__ __forceinline__ void add(float4& to, const float4& v) {
  to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// Each thread takes the results for four columns of a token, and may do so while the experts' kernel is still
// running: that kernel does not use `out`, and has stored these results before.
template <class T>
__global__ void __launch_bounds__(kAddThreads) add_direct_kernel(const __grid_constant__ A2aArgs args) {
  const A2aRound& a = args.round;
  const int ranks = a.group.size, me = a.group.rank, vectors = static_cast<int>(a.shape.hidden_size / 4);
  const int token = first_row(args.work), piece = static_cast<int>(blockIdx.x) - token * args.work.pieces;
  const int v = piece * kAddThreads + static_cast<int>(threadIdx.x);
  ptx::grid_dependents_launch();
  const DirectRound round(a);
  const Operation o(a.group, a.op);
  if (o.failed) return ptx::grid_dependency_wait();
  const auto from = [&](int r) { return reinterpret_cast<ResultWords<T>*>(round.sum<T>(me, token, r)) + v; };
  float4* const out = reinterpret_cast<float4*>(args.out) + int64_t{token} * vectors + v;
  const bool is_added = v < vectors && is_filled(a, token);
  float4 result{}, sum{};
  if (is_added) result = __ldcg(out);
  for (int first = 0; first < ranks && v < vectors; first += 2) {
    ResultWords<T> words[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) words[j] = load_words(from(min(first + j, ranks - 1)));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = first + j;
      if (r >= ranks) break;
      o.wait(r, [&](uint32_t&) {
        if (!has_arrived(words[j])) words[j] = load_words(from(r));
        return has_arrived(words[j]);
      });
      add(sum, as_floats(words[j]));
    }
  }
  for (int r = 0; r < ranks && v < vectors; ++r) mark_unsent(from(r));
  add(result, sum);
  if (is_added) *out = result;
  ptx::grid_dependency_wait();
  if (threadIdx.x == 0 && o.entered_last()) state_of(a.group, me)->num_direct = round.num_before + 1;
}

void check(const A2aRound& a) {
  FP4MOE_CHECK(a.area.direct_sums != 0 && a.group.size * a.num_tokens <= kDirectLanes,
               "a direct round of " + std::to_string(a.num_tokens) + " tokens per rank");
}

}  // namespace

void load_send_direct() { prepare_kernel(send_direct_kernel, {}); }

void send_direct(const A2aRound& a, const bf16* x) {
  check(a);
  load_send_direct();
  const Work work = work_of(a, kMaxCommBlocks, kThreads, 1);
  FP4MOE_CHECK(work.piece_vectors <= kThreads && work.blocks == work.rows * work.pieces,
               "a row has too many pieces");
  launch("a2a_send_direct", send_direct_kernel, shape_of(work), A2aArgs{.round = a, .work = work, .x = x});
}

void add_direct(const A2aRound& a, float* out) {
  check(a);
  const bool is_f32 = a.shape.result_format == A2aResultFormat::kF32;
  const Work work{.rows = static_cast<int>(a.num_tokens),
                  .pieces = static_cast<int>(ceil_div(a.shape.hidden_size / 4, kAddThreads))};
  launch("a2a_add_direct", is_f32 ? add_direct_kernel<float> : add_direct_kernel<bf16>,
         {dim3(static_cast<unsigned>(work.rows * work.pieces)), dim3(kAddThreads)},
         A2aArgs{.round = a, .work = work, .out = out});
}

}  // namespace fp4moe::cuda
