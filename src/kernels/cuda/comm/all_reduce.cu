// All-reduce over the GPUs of a group; the sum is added to the residual.
//
// Computes:  out [n] += sum over ranks r, in order, of partial_r [n], f32.
// Shapes:    n a multiple of 4; any number of ranks up to kMaxGroupRanks.
// Bytes:     one-shot: 4 n to each of R - 1 peers. Two-shot: 4 n (R - 1) / R of partials, and as many of
//            sums.
// Flops:     R n.
// Bound:     the links for large n; for small n, the latency of a store and of a poll at the receiver.
// Numerics:  every rank adds the same f32 words in the same order, so all ranks get the same bits, with
//            either algorithm. -0.0 marks a word that has not arrived; a partial or a sum of -0.0 becomes
//            +0.0.
#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256;

struct ReduceArgs {
  CommGroup group;
  CommOp op;
  const uint4* partial;  // [num_vectors] of 4 f32
  float4* out;
  int64_t num_vectors;
};

__device__ __forceinline__ void add_words(float4& sum, const uint4& v) {
  sum.x += __uint_as_float(v.x);
  sum.y += __uint_as_float(v.y);
  sum.z += __uint_as_float(v.z);
  sum.w += __uint_as_float(v.w);
}
__device__ __forceinline__ uint4 words_of(const float4& v) {
  return {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
}

// Returns the address of words[parity][source] of `rank`.
__device__ __forceinline__ uint8_t* words_at(const Operation& o, int rank, int source) {
  const CommLayout& layout = o.group.layout;
  return o.group.regions[rank] + layout.words +
         (int64_t{o.parity()} * o.group.size + source) * layout.word_bytes;
}

// Returns the sum over ranks of vector i, which is at index `word` among each source's words.
__device__ __forceinline__ uint4 sum_of(const Operation& o, const ReduceArgs& a, int64_t i, int64_t word) {
  float4 sum{};
  for (int r = 0; r < a.group.size; ++r) {
    if (r == a.group.rank)
      add_words(sum, sendable(__ldcg(a.partial + i)));
    else
      add_words(sum, take_words(o, r, words_at(o, a.group.rank, r) + word * 16));
  }
  return sendable(words_of(sum));
}

__device__ __forceinline__ void add_to(float4* out, const uint4& sum) {
  float4 v = __ldcg(out);
  add_words(v, sum);
  *out = v;
}

__device__ __forceinline__ int64_t first_vector() { return blockIdx.x * int64_t{kThreads} + threadIdx.x; }
__device__ __forceinline__ int64_t num_threads() { return gridDim.x * int64_t{kThreads}; }

// Every rank sends its whole partial to every peer, and sums all partials.
__global__ void __launch_bounds__(kThreads) one_shot_kernel(const __grid_constant__ ReduceArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  for (int64_t i = first_vector(); i < a.num_vectors; i += num_threads()) {
    const uint4 v = sendable(__ldcg(a.partial + i));
    for (int r = 0; r < a.group.size; ++r)
      if (r != a.group.rank) store_words(words_at(o, r, a.group.rank) + i * 16, v);
  }
  for (int64_t i = first_vector(); i < a.num_vectors; i += num_threads())
    add_to(a.out + i, sum_of(o, a, i, i));
}

// Rank r sums the vectors [begin(r), begin(r + 1)) and sends the sums to all ranks.
__global__ void __launch_bounds__(kThreads) two_shot_kernel(const __grid_constant__ ReduceArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  const int me = a.group.rank, size = a.group.size;
  const auto begin = [&](int r) { return a.num_vectors * r / size; };
  const auto owner = [&](int64_t i) {
    int r = static_cast<int>(i * size / a.num_vectors);
    while (r + 1 < size && begin(r + 1) <= i) ++r;
    return r;
  };
  const int64_t sums = a.group.layout.sums + int64_t{o.parity()} * size * a.group.layout.word_bytes;
  for (int64_t i = first_vector(); i < a.num_vectors; i += num_threads()) {
    const int r = owner(i);
    if (r != me) store_words(words_at(o, r, me) + (i - begin(r)) * 16, sendable(__ldcg(a.partial + i)));
  }
  for (int64_t i = begin(me) + first_vector(); i < begin(me + 1); i += num_threads()) {
    const uint4 sum = sum_of(o, a, i, i - begin(me));
    for (int r = 0; r < size; ++r)
      if (r != me) store_words(a.group.regions[r] + sums + i * 16, sum);
    add_to(a.out + i, sum);
  }
  for (int64_t i = first_vector(); i < a.num_vectors; i += num_threads())
    if (const int r = owner(i); r != me)
      add_to(a.out + i, take_words(o, r, a.group.regions[me] + sums + i * 16));
}

struct ArmArgs {
  uint4* region;
  int64_t num_zeros, num_vectors;  // vectors to zero (state and flags); all vectors, with the words
};

__global__ void __launch_bounds__(kThreads) arm_kernel(const __grid_constant__ ArmArgs a) {
  ptx::grid_dependency_wait();
  for (int64_t i = first_vector(); i < a.num_vectors; i += num_threads()) {
    const uint32_t word = i < a.num_zeros ? 0 : kUnsent;
    a.region[i] = make_uint4(word, word, word, word);
  }
}

}  // namespace

void arm_group(const CommGroup& g) {
  auto* const region = reinterpret_cast<uint4*>(g.regions[g.rank]);
  launch("comm_arm", arm_kernel, {dim3(static_cast<unsigned>(g.max_blocks)), dim3(kThreads)},
         ArmArgs{region, g.layout.words / 16, g.layout.gather / 16});
}

void all_reduce(const AllReduceArgs& a) {
  const int64_t most = a.group.layout.word_bytes * (a.two_shot ? a.group.size : 1);
  FP4MOE_CHECK(a.n % 4 == 0 && 4 * a.n <= most && (!a.two_shot || a.group.size > 2),
               "all_reduce of " + std::to_string(a.n) + " elements over " + std::to_string(a.group.size) +
                   " ranks; elements that fit in the heap: " + std::to_string(most / 4));
  const int64_t vectors = a.n / 4;
  const auto blocks = std::clamp<int64_t>(ceil_div(vectors, kThreads), 1, a.group.max_blocks);
  launch(a.two_shot ? "all_reduce_two_shot" : "all_reduce", a.two_shot ? two_shot_kernel : one_shot_kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
         ReduceArgs{a.group, a.op, reinterpret_cast<const uint4*>(a.partial),
                    reinterpret_cast<float4*>(a.out), vectors});
}

int all_reduce_blocks_per_sm() {
  int one = 0, two = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&one, one_shot_kernel, kThreads, 0);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&two, two_shot_kernel, kThreads, 0);
  return std::min(one, two);
}

}  // namespace fp4moe::cuda
