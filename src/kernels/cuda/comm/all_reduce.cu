// All-reduce over the GPUs of a group; the sum is added to the residual.
//
// Computes:  out [n] += sum over ranks r, in order, of partial_r [n], f32; partial_r rounded to bf16 first if
//            it is sent as bf16.
// Shapes:    n a multiple of a vector's elements: 4 f32 or 8 bf16; any number of ranks up to kMaxGroupRanks.
// Bytes:     one-shot: w n to each of R - 1 peers, with w = 4 or 2, unless the kernel before has sent it
//            (partial_sender.cuh). Two-shot: w n (R - 1) / R of partials and 4 n (R - 1) / R of sums.
// Flops:     R n.
// Bound:     the links for large n; for small n, the latency of a store and of a poll at the receiver.
// Numerics:  every rank adds the same words in the same order in f32, so all ranks get the same bits, with
//            either algorithm.
#include <algorithm>
#include <climits>
#include <string>

#include "base/check.h"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/partials.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/staged_transfers.h"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256;

struct ReduceArgs {
  CommGroup group;
  CommOp op;
  const float* partial;
  float* out;
  int64_t num_vectors;  // of Elements
  bool are_sent;        // the partials, by the kernel before; only one-shot
};

// Returns the first rank after r that is not this one, or the group's size.
__device__ __forceinline__ int peer_after(const CommGroup& group, int r) {
  return r + 1 == group.rank ? r + 2 : r + 1;
}

// Returns the sum over ranks of vector i, which is at index `word` among each source's vectors. The words of
// each peer are loaded before those of the preceding one have arrived.
template <bool kBf16>
__device__ __forceinline__ Elements<kBf16> sum_of(const Operation& o, const ReduceArgs& a, int64_t i,
                                                  int64_t word) {
  using E = Elements<kBf16>;
  const E own = E::load(a.partial + i * E::kCount);
  E sum;
  uint4 words;
  mark_unsent(&words);
  for (int r = 0; r < a.group.size; ++r) {
    if (r == a.group.rank) {
      sum += E::unpack(own.pack());
      continue;
    }
    uint4 ahead;
    mark_unsent(&ahead);
    if (const int next = peer_after(a.group, r); next < a.group.size)
      ahead = load_words(words_at<uint4>(o, a.group.rank, next) + word);
    finish_taking(o, r, words_at<uint4>(o, a.group.rank, r) + word, words);
    sum += E::unpack(words);
    words = ahead;
  }
  return sum;
}

template <bool kBf16>
__device__ __forceinline__ void add_to(const ReduceArgs& a, int64_t i, const Elements<kBf16>& sum) {
  float* const out = a.out + i * Elements<kBf16>::kCount;
  auto v = Elements<kBf16>::load(out);
  v += sum;
  v.store(out);
}

__device__ __forceinline__ int64_t first_vector() { return blockIdx.x * int64_t{kThreads} + threadIdx.x; }
__device__ __forceinline__ int64_t num_threads() { return gridDim.x * int64_t{kThreads}; }

// Every rank sends its whole partial to every peer, and sums all partials.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads) one_shot_kernel(const __grid_constant__ ReduceArgs a) {
  using E = Elements<kBf16>;
  ptx::grid_dependents_launch();
  const EarlyWords early(a.group);
  ptx::grid_dependency_wait();
  // The loads of the first vector and of the epoch are on their way together.
  const int64_t begin = first_vector();
  const auto own_vector = [&](int64_t i) {
    return i < a.num_vectors ? E::load(a.partial + i * E::kCount) : E();
  };
  E mine = own_vector(begin);
  E out = begin < a.num_vectors ? E::load(a.out + begin * E::kCount) : E();
  uint4 words;
  mark_unsent(&words);
  if (a.are_sent && begin < a.num_vectors) words = early.load<uint4>(begin);
  const Operation o(a.group, a.op);
  early.check(o, words);
  if (o.failed) return;
  const auto send = [&](int64_t i, const E& own) {
    if (i >= a.num_vectors || a.are_sent) return;
    const uint4 v = own.pack();
    for (int r = 0; r < a.group.size; ++r)
      if (r != a.group.rank) store_words(words_at<uint4>(o, r, a.group.rank) + i, v);
  };
  send(begin, mine);
  for (int64_t i = begin; i < a.num_vectors; i += num_threads()) {
    const E next = own_vector(i + num_threads());
    send(i + num_threads(), next);  // the links carry it during the sum
    // Not sum_of(), which takes 16 more registers: tp 2 decodes 2.4 % more slowly with it.
    E sum;
    for (int r = 0; r < a.group.size; ++r) {
      if (r == a.group.rank) {
        sum += E::unpack(mine.pack());
        continue;
      }
      finish_taking(o, r, words_at<uint4>(o, a.group.rank, r) + i, words);
      sum += E::unpack(words);
      mark_unsent(&words);
    }
    if (i != begin) out = E::load(a.out + i * E::kCount);
    out += sum;
    out.store(a.out + i * E::kCount);
    mine = next;
  }
}

// Each rank sums a section of the vectors and sends the sums, as f32, to all ranks. A thread sends its vector
// of each section, then sums its vector before, then adds the sums before that one, so that the links carry
// vectors to and from all ranks at all times.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads) two_shot_kernel(const __grid_constant__ ReduceArgs a) {
  using E = Elements<kBf16>;
  constexpr int kSumWords = E::kCount / 4;  // 16-byte vectors of a vector's f32 sums
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  const int me = a.group.rank, size = a.group.size;
  const int64_t section = (a.num_vectors + size - 1) / size;
  const int64_t sums = a.group.layout.sums + int64_t{o.parity()} * size * a.group.layout.word_bytes;
  const auto sums_at = [&](int r, int64_t i, int w) {
    return reinterpret_cast<uint4*>(a.group.regions[r] + sums) + w * a.num_vectors + i;
  };
  // Calls f(r, i) for the peers r, beginning after this rank, with vector i at index v of r's section.
  const auto for_sections = [&](int64_t v, const auto& f) {
    if (v < 0 || v >= section) return;
    for (int d = 1; d < size; ++d) {
      const int r = me + d < size ? me + d : me + d - size;
      if (const int64_t i = r * section + v; i < a.num_vectors) f(r, i);
    }
  };
  const auto reduce = [&](int64_t v) {
    const int64_t i = me * section + v;
    if (v < 0 || v >= section || i >= a.num_vectors) return;
    const E sum = sum_of<kBf16>(o, a, i, v);
    for (int w = 0; w < kSumWords; ++w) {
      const uint4 words = Elements<false>{{sum.values[4 * w], sum.values[4 * w + 1], sum.values[4 * w + 2],
                                           sum.values[4 * w + 3]}}
                              .pack();
      for (int r = 0; r < size; ++r)
        if (r != me) store_words(sums_at(r, i, w), words);
    }
    add_to(a, i, sum);
  };
  const int64_t step = num_threads();
  for (int64_t v = first_vector(); v < section + 2 * step; v += step) {
    for_sections(v, [&](int r, int64_t i) {
      store_words(words_at<uint4>(o, r, me) + v, E::load(a.partial + i * E::kCount).pack());
    });
    reduce(v - step);
    for_sections(v - 2 * step, [&](int r, int64_t i) {
      E sum;
      for (int w = 0; w < kSumWords; ++w) {
        const auto part = Elements<false>::unpack(take_words(o, r, sums_at(me, i, w)));
        for (int j = 0; j < 4; ++j) sum.values[4 * w + j] = part.values[j];
      }
      add_to(a, i, sum);
    });
  }
}

struct StagedArgs {
  const float* partial;
  uint8_t* words;  // rank r's operand at r * word_bytes, as it was sent
  float* out;
  int64_t num_vectors;  // of Elements
  int64_t word_bytes;
  int rank, size;
};

// Without shared memory: stores this rank's operand as it is sent in its own place among the words.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ StagedArgs a) {
  using E = Elements<true>;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  auto* const mine = reinterpret_cast<uint4*>(a.words + a.rank * a.word_bytes);
  for (int64_t i = first_vector(); i < a.num_vectors; i += num_threads())
    mine[i] = E::load(a.partial + i * E::kCount).pack();
}

// Without shared memory: adds all operands once they have arrived.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads) staged_sum_kernel(const __grid_constant__ StagedArgs a) {
  using E = Elements<kBf16>;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  for (int64_t i = first_vector(); i < a.num_vectors; i += num_threads()) {
    E sum;
    for (int r = 0; r < a.size; ++r) {
      const auto* const words = reinterpret_cast<const uint4*>(a.words + r * a.word_bytes);
      sum += E::unpack(r == a.rank ? E::load(a.partial + i * E::kCount).pack() : __ldcg(words + i));
    }
    float* const out = a.out + i * E::kCount;
    auto v = E::load(out);
    v += sum;
    v.store(out);
  }
}

// f32 partials are sent from where they are.
void staged_all_reduce(const AllReduceArgs& a, int64_t vectors) {
  const CommGroup& g = a.group;
  const StagedArgs args{a.partial, staged_words(g, 0), a.out, vectors, g.layout.word_bytes, g.rank, g.size};
  const auto blocks = std::clamp<int64_t>(ceil_div(vectors, kThreads), 1, g.max_blocks);
  const LaunchShape shape{dim3(static_cast<unsigned>(blocks)), dim3(kThreads)};
  if (a.bf16_partials) launch("all_reduce_pack", pack_kernel, shape, args);
  const void* const mine = a.bf16_partials ? staged_words(g, g.rank) : static_cast<const void*>(a.partial);
  g.plane->exchange(a.op, sum_transfers(g, mine, vectors * int64_t{sizeof(uint4)}));
  launch("all_reduce_staged", a.bf16_partials ? staged_sum_kernel<true> : staged_sum_kernel<false>, shape,
         args);
}

struct ArmArgs {
  uint4* region;
  int64_t num_zeros, num_words;  // vectors to zero (state and flags); these and the words
  int64_t exchange, end;         // vectors of the exchange memory, which has words too
};

__global__ void __launch_bounds__(kThreads) arm_kernel(const __grid_constant__ ArmArgs a) {
  ptx::grid_dependency_wait();
  const auto set = [&](int64_t i, uint32_t word) { a.region[i] = make_uint4(word, word, word, word); };
  for (int64_t i = first_vector(); i < a.num_words; i += num_threads()) set(i, i < a.num_zeros ? 0 : kUnsent);
  for (int64_t i = a.exchange + first_vector(); i < a.end; i += num_threads()) set(i, kUnsent);
}

}  // namespace

void arm_group(const CommGroup& g) {
  auto* const region = reinterpret_cast<uint4*>(g.regions[g.rank]);
  launch("comm_arm", arm_kernel, {dim3(static_cast<unsigned>(g.max_blocks)), dim3(kThreads)},
         ArmArgs{region, g.layout.words / 16, g.layout.gather / 16, g.layout.exchange / 16,
                 (g.layout.exchange + g.layout.exchange_bytes) / 16});
}

bool may_be_sent(const AllReduceArgs& a) {
  return !a.are_sent || (!a.bf16_partials && !a.two_shot && a.group.plane == nullptr);
}

void all_reduce(const AllReduceArgs& a) {
  const int64_t per_vector = a.bf16_partials ? 8 : 4;
  const int64_t most = max_sum_elements(a.group, a.bf16_partials, a.two_shot);
  FP4MOE_CHECK(a.n % per_vector == 0 && a.n <= most &&
                   (!a.two_shot || (a.group.size > 2 && a.group.plane == nullptr)) && may_be_sent(a),
               "all_reduce of " + std::to_string(a.n) + " elements over " + std::to_string(a.group.size) +
                   " ranks; elements that fit in the heap: " + std::to_string(most));
  const int64_t vectors = a.n / per_vector;
  if (a.group.plane != nullptr) return staged_all_reduce(a, vectors);
  const auto blocks = std::clamp<int64_t>(ceil_div(vectors, kThreads), 1, a.group.max_blocks);
  const auto kernel = a.two_shot ? (a.bf16_partials ? two_shot_kernel<true> : two_shot_kernel<false>)
                                 : (a.bf16_partials ? one_shot_kernel<true> : one_shot_kernel<false>);
  launch(a.two_shot ? "all_reduce_two_shot" : "all_reduce", kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
         ReduceArgs{a.group, a.op, a.partial, a.out, vectors, a.are_sent});
}

int all_reduce_blocks_per_sm() {
  int least = INT_MAX;
  for (const auto kernel :
       {one_shot_kernel<false>, one_shot_kernel<true>, two_shot_kernel<false>, two_shot_kernel<true>}) {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0);
    least = std::min(least, blocks);
  }
  return least;
}

}  // namespace fp4moe::cuda
