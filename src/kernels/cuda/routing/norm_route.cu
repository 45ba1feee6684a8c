// Normalises and routes tokens in one launch: for few tokens by blocks that share a token's experts; for
// more, by one to four blocks per token.
//
// Computes:  y = x / sqrt(mean(x^2) + eps) * weight as bf16 and f32; logits = y W^T (+ bias); then
//            choose_experts() for each token. y, ids and weights can also go to other ranks: in a direct
//            round if there are few tokens, else in a round of bf16 rows (kernels/device_a2a.h).
// Shapes:    x [T, H] f32, H a multiple of 8; W [E, H] bf16. Up to 16 tokens: H up to 8192, a block has
//            kBlockExperts rows of W in shared memory, and another block chooses. More tokens: H up to 4096.
// Bytes:     2 E H of weights for each token (from the L2 after the first), T H (4 + 2 + 4) of x and y.
// Flops:     2 T E H as f32 multiply-adds.
// Bound:     latency: the weights are loaded before the wait (with one to four blocks per token, those of 16
//            experts per block); then x is read, a block's warps add their sums, and the experts are chosen.
//            Logits reach the block that chooses as 64-bit words whose upper half marks the lower half as
//            valid: one trip through the L2, without fences, counters or clusters.
// Numerics:  f32 sums of x * weight * W, added over a lane's columns in order, over a warp's lanes by halving
//            and over the eighths of H in order; then multiplied by 1 / rms, which has an error of 2 units in
//            the last place. The same bits for every T.
#include "kernels/cuda/routing/norm_route.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/routing/norm_route_senders.cuh"
#include "kernels/cuda/routing/router_choice.cuh"

namespace fp4moe {
namespace {

constexpr int kParts = 8;  // of a row: a warp has one
constexpr int kThreads = kParts * 32;
constexpr int kVector = 8;      // columns that a lane reads at once
constexpr int kMaxVectors = 4;  // vectors per lane
constexpr int kBlockExperts = 4;
constexpr int kBlockThreads = 2 * kParts * 32;        // threads, with one block per token
constexpr int kBlockVectors = 2, kExpertsAhead = 8;   // per lane, with one block per token
constexpr int64_t kMaxBlockExperts = 512;             // with one block per token: experts that fit
constexpr int64_t kMaxBlockBytes = 24 * 1024 * 1024;  // with one block per token: weights read in all
constexpr int64_t kMaxBytesInAll = 3 * 1024 * 1024;   // for few tokens: weights read in all

// The vectors [begin, end) of a row that a warp processes.
struct Part {
  int begin, end;
  __host__ __device__ Part(int num_vectors, int part)
      : begin(num_vectors * part / kParts), end(num_vectors * (part + 1) / kParts) {}
};
constexpr int max_part(int num_vectors) { return (num_vectors + kParts - 1) / kParts; }

__device__ __forceinline__ float warp_total(float sum) {
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

// Adds up kCount sums, a power of two, over the warp's lanes, each as warp_total() does. Returns the total of
// sum lane / (32 / kCount). Every step halves the number of sums that a lane adds.
template <int kCount>
__device__ __forceinline__ float warp_totals(float (&sum)[kCount]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int offset = 16;
#pragma unroll
  for (int count = kCount / 2; count > 0; count /= 2, offset /= 2) {
    const bool high = (lane & offset) != 0;
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const float other = __shfl_xor_sync(~0u, high ? sum[j] : sum[j + count], offset);
      sum[j] = (high ? sum[j + count] : sum[j]) + other;
    }
  }
  for (; offset > 0; offset /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], offset);
  return sum[0];
}

__device__ __forceinline__ void send(const float* to, int block, float value) {
  ptx::st_cluster(ptx::map_cluster(ptx::shared_address(to), static_cast<uint32_t>(block)), value);
}

// A lane's columns: vectors lane, lane + 32, ... of its warp's part.
template <int kCount>
struct Columns {
  float values[kCount][kVector] = {};

  __device__ void load(const float* row, const Part& part) {
    each(part, [&](int i, int v) {
      const float4* from = reinterpret_cast<const float4*>(row + v * kVector);
      const float4 a = __ldcg(from), b = __ldcg(from + 1);
      float* x = values[i];
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    });
  }
  template <class Function>
  static __device__ void each(const Part& part, Function function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (const int v = part.begin + i * 32 + static_cast<int>(threadIdx.x) % 32; v < part.end)
        function(i, v);
  }
};

__device__ __forceinline__ float dot(const float (&x)[kVector], const uint4& w, float sum) {
  const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum = fmaf(x[2 * i + 1], ptx::high_of_pair(pairs[i]), fmaf(x[2 * i], ptx::low_of_pair(pairs[i]), sum));
  return sum;
}

// Writes vector v of a token's normalised row and returns it in bf16; x is already multiplied by the norm's
// weight.
__device__ __forceinline__ uint4 write_vector(const NormRouteArgs& a, int64_t t, int v,
                                              const float (&x)[kVector], float inverse) {
  float y[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) y[j] = x[j] * inverse;
  const int64_t at = t * a.hidden_size + v * kVector;
  const uint4 rounded = {ptx::bf16_pair(y[0], y[1]), ptx::bf16_pair(y[2], y[3]), ptx::bf16_pair(y[4], y[5]),
                         ptx::bf16_pair(y[6], y[7])};
  *reinterpret_cast<uint4*>(a.out_act + at) = rounded;
  float4* f32 = reinterpret_cast<float4*>(a.out_f32 + at);
  f32[0] = {y[0], y[1], y[2], y[3]};
  f32[1] = {y[4], y[5], y[6], y[7]};
  return rounded;
}

// Multiplies x by the norm's weight; returns the sum of the squares of the original x in the lane's columns.
template <int kCount>
__device__ __forceinline__ float square_and_weigh(const Columns<kCount>& norm_weight, Columns<kCount>& x) {
  float square = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      square = fmaf(x.values[i][j], x.values[i][j], square);
      x.values[i][j] *= norm_weight.values[i][j];
    }
  return square;
}

__device__ __forceinline__ float inverse_rms(const NormRouteArgs& a, const float* squares) {
  float total = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) total += squares[i];
  return rsqrtf(fmaf(total, a.inverse_hidden, a.eps));
}

// Adds up an expert's sums over the parts, which are `pitch` apart.
__device__ __forceinline__ float logit_of(const float* sums, int pitch, float inverse, float bias) {
  float sum = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) sum += sums[part * pitch];
  return fmaf(sum, inverse, bias);
}
__device__ __forceinline__ float bias_of(const NormRouteArgs& a, int e) {
  return a.bias != nullptr ? __ldg(a.bias + e) : 0;
}

// Returns the number of tokens whose experts are counted.
__device__ __forceinline__ int counted_tokens(const NormRouteArgs& a) {
  return a.out.count.counts != nullptr ? __ldcg(a.out.count.num_rows) - a.out.count.first_row : 0;
}

// ---- few tokens ------------------------------------------------------------------------------------------

constexpr RouterWord kThere = RouterWord{1} << 32;

__device__ __forceinline__ void put_word(RouterWord* to, float value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(kThere | __float_as_uint(value))
               : "memory");
}
// Waits for a word and clears it.
__device__ __forceinline__ float take_word(RouterWord* from) {
  RouterWord word = 0;
  while (word == 0) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  *from = 0;
  return __uint_as_float(static_cast<uint32_t>(word));
}

// The block that chooses: collects the logits from the others. Before the wait, its first warp chooses once
// for nothing: the instructions, which a step's weights have replaced in all caches, are then there.
template <class Sender>
__device__ __forceinline__ void collect_and_choose(const typename Sender::Args& a, int t, uint32_t* memory) {
  __shared__ int32_t no_ids[kMaxDeviceTopk];
  __shared__ float no_weights[kMaxDeviceTopk];
  const ChoiceMemory choice(a.rule, memory);
#pragma unroll 1  // the same instructions
  for (bool is_real : {false, true}) {
    int counted = 0;  // loaded before the logits have come
    if (is_real) {
      ptx::grid_dependency_wait();
      ptx::grid_dependents_launch();
      counted = counted_tokens(a);
    }
    const Sender sender(a, t);
    for (int e = static_cast<int>(threadIdx.x); e < a.num_experts; e += kThreads)
      choice.put(a.rule, e, is_real ? take_word(a.words + int64_t{t} * a.num_experts + e) : 0);
    __syncthreads();
    if (threadIdx.x < 32) {
      const Choices out = is_real ? a.out : Choices{no_ids, no_weights, {}};
      const ChosenSlot slot = choose_of(a.rule, choice, out, is_real ? t : 0);
      if (is_real) sender.send_slot(slot);
      if (slot.id >= 0 && t < counted) add_count(a.out.count.counts, slot.id, 1);
    }
    __syncthreads();
  }
}

// Copies the weights of `count` experts. Each lane copies those that it will multiply itself, so that no
// barrier is needed.
template <int kVectors>
__device__ __forceinline__ void copy_weights(const NormRouteArgs& a, int first, int count, const Part& part,
                                             uint4* weights) {
  const int pitch = a.hidden_size / kVector;
  for (int e = 0; e < count; ++e)
    Columns<kVectors>::each(part, [&](int, int v) {
      ptx::cp_async16(ptx::shared_address(weights + e * pitch + v),
                      a.weight + static_cast<int64_t>(first + e) * a.hidden_size + v * kVector, 16);
    });
  ptx::cp_async_commit();
}

// Grid: (1 + blocks of kBlockExperts experts, T). The first block of a token chooses. Memory: the weights
// [kBlockExperts][H], or that of the choice. kVectors: vectors per lane, as many as a part needs, because
// those past its end cost almost as much as others.
template <int kVectors, class Sender>
__global__ void __launch_bounds__(kThreads, kVectors == 4 ? 2 : 4)
    norm_route_kernel(const __grid_constant__ typename Sender::Args a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float squares[kParts], sums[kParts][kBlockExperts];
  const int t = static_cast<int>(blockIdx.y), worker = static_cast<int>(blockIdx.x) - 1;
  if (worker < 0) return collect_and_choose<Sender>(a, t, reinterpret_cast<uint32_t*>(memory));
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int num_vectors = a.hidden_size / kVector, first = worker * kBlockExperts,
            count = min(kBlockExperts, a.num_experts - first);
  const Part part(num_vectors, warp);
  uint4* weights = reinterpret_cast<uint4*>(memory);
  copy_weights<kVectors>(a, first, count, part, weights);
  Columns<kVectors> norm_weight, x;
  norm_weight.load(a.norm_weight, part);
  const int e = first + static_cast<int>(threadIdx.x);  // of the first threads
  const float bias = threadIdx.x < count ? bias_of(a, e) : 0;
  ptx::grid_dependency_wait();
  x.load(a.x + int64_t{t} * a.hidden_size, part);
  const Sender sender(a, t);
  // Not launched sooner: the experts' blocks, which wait for whole SMs, would then run 15 % longer.
  ptx::grid_dependents_launch();
  const float square = square_and_weigh(norm_weight, x);
  ptx::cp_async_wait<0>();
  float sum[kBlockExperts] = {};
  Columns<kVectors>::each(part, [&](int i, int v) {
#pragma unroll
    for (int j = 0; j < kBlockExperts; ++j)
      sum[j] = dot(x.values[i], weights[min(j, count - 1) * num_vectors + v], sum[j]);
  });
  constexpr int kLanes = 32 / kBlockExperts;
  const float total = warp_totals(sum), squares_total = warp_total(square);
  if (lane % kLanes == 0) sums[warp][lane / kLanes] = total;
  if (lane == 0) squares[warp] = squares_total;
  __syncthreads();
  const float inverse = inverse_rms(a, squares);
  if (threadIdx.x < count) {
    const float logit = logit_of(&sums[0][threadIdx.x], kBlockExperts, inverse, bias);
    put_word(a.words + int64_t{t} * a.num_experts + e, logit);
    a.logits[int64_t{t} * a.num_experts + e] = logit;
  }
  const int workers = static_cast<int>(gridDim.x) - 1;
  Columns<kVectors>::each(part, [&](int i, int v) {
    if (v % workers == worker) sender.send_row(v, write_vector(a, t, v, x.values[i], inverse));
  });
}

// ---- one to four blocks for each token -------------------------------------------------------------------
//
// Each warp of a block has the same columns as above; two warps have the same columns and split the block's
// experts. So the sums are the same, and are added in the same order. A token's blocks split the experts; the
// first one gets all sums. The last one, which has less to do, writes the row, unless the row and the choice
// are also sent: one block raises the flags of both.

// A lane's weights in the warp's columns, for every second expert beginning with `first`.
struct ExpertWeights {
  uint4 values[kExpertsAhead][kBlockVectors];

  __device__ __forceinline__ void load(const NormRouteArgs& a, const Part& part, int first) {
#pragma unroll
    for (int j = 0; j < kExpertsAhead; ++j) {
      const int64_t e = min(first + 2 * j, a.num_experts - 1);
      Columns<kBlockVectors>::each(part, [&](int i, int v) {
        values[j][i] = __ldg(reinterpret_cast<const uint4*>(a.weight + e * a.hidden_size + v * kVector));
      });
    }
  }
};

// Shared memory: the parts' squares [kParts] and sums [kParts][E]; logits [E]; the memory for the choice.
template <class Sender>
__global__ void __launch_bounds__(kBlockThreads, 1)
    norm_route_block_kernel(const __grid_constant__ typename Sender::Args a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  if (blocks > 1) ptx::cluster_arrive();
  ptx::grid_dependents_launch();
  float* squares = reinterpret_cast<float*>(memory);
  float* sums = squares + kParts;
  float* logits = sums + kParts * a.num_experts;
  const int warp = static_cast<int>(threadIdx.x) / 32, half = warp / kParts, t = static_cast<int>(blockIdx.y),
            lane = static_cast<int>(threadIdx.x) % 32;
  const Part part(a.hidden_size / kVector, warp % kParts);
  ExpertWeights weights;
  weights.load(a, part, 2 * kExpertsAhead * block + half);
  Columns<kBlockVectors> norm_weight, x;
  norm_weight.load(a.norm_weight, part);
  ptx::grid_dependency_wait();
  const int counted = counted_tokens(a);
  x.load(a.x + int64_t{t} * a.hidden_size, part);
  const Sender sender(a, t);  // reads what it needs while x is under way
  const float square = warp_total(square_and_weigh(norm_weight, x));
  if (half == 0 && lane == 0) squares[warp] = square;
  if (blocks > 1) ptx::cluster_wait();  // the first block has started: its shared memory can be written
  const int step = 2 * kExpertsAhead * blocks;
  for (int first = 2 * kExpertsAhead * block + half; first < a.num_experts; first += step) {
    float sum[kExpertsAhead] = {};
#pragma unroll
    for (int j = 0; j < kExpertsAhead; ++j)
      Columns<kBlockVectors>::each(
          part, [&](int i, int) { sum[j] = dot(x.values[i], weights.values[j][i], sum[j]); });
    if (first + step < a.num_experts) weights.load(a, part, first + step);
    constexpr int kLanes = 32 / kExpertsAhead;
    const float total = warp_totals(sum);
    if (const int e = first + 2 * (lane / kLanes); lane % kLanes == 0 && e < a.num_experts)
      send(sums + warp % kParts * a.num_experts + e, 0, total);
  }
  if (blocks > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  const float inverse = inverse_rms(a, squares);
  if (block == 0) {
    for (int e = static_cast<int>(threadIdx.x); e < a.num_experts; e += kBlockThreads) {
      logits[e] = logit_of(sums + e, a.num_experts, inverse, bias_of(a, e));
      a.logits[int64_t{t} * a.num_experts + e] = logits[e];
    }
    __syncthreads();
    if (warp == kParts) {
      uint32_t* const room = reinterpret_cast<uint32_t*>(logits + a.num_experts);
      const ChosenSlot slot = choose_by_warp(a.rule, logits, room, a.out, t);
      sender.send_slot(slot);
      if (slot.id >= 0 && t < counted) add_count(a.out.count.counts, slot.id, 1);
    }
  }
  if (half == 0 && block == (Sender::kSends ? 0 : blocks - 1))
    Columns<kBlockVectors>::each(
        part, [&](int i, int v) { sender.send_row(v, write_vector(a, t, v, x.values[i], inverse)); });
  if (Sender::kSends && block == 0) sender.finish();
}
int block_shared_bytes(int num_experts) {
  return 4 * (kParts + (kParts + 1) * num_experts + choice_words(num_experts));
}

// The kernel's kVectors for parts of up to max_part vectors.
constexpr int vectors_per_lane(int max_part) { return max_part <= 32 ? 1 : max_part <= 64 ? 2 : 4; }
size_t few_shared_bytes(const NormRouteArgs& a) {
  return static_cast<size_t>(std::max(kBlockExperts * a.hidden_size * 2, 4 * choice_words(a.num_experts)));
}
template <class Sender>
void launch_few(const typename Sender::Args& a, int64_t num_tokens) {
  const int vectors = vectors_per_lane(max_part(a.hidden_size / kVector));
  const auto kernel = vectors == 1   ? norm_route_kernel<1, Sender>
                      : vectors == 2 ? norm_route_kernel<2, Sender>
                                     : norm_route_kernel<4, Sender>;
  prepare_kernel(kernel, {.shared_bytes = device_limits().shared_bytes_per_block, .shares_sm = true});
  const int64_t workers = ceil_div(a.num_experts, kBlockExperts);
  launch("norm_route", kernel,
         {dim3(static_cast<unsigned>(1 + workers), static_cast<unsigned>(num_tokens)), dim3(kThreads),
          few_shared_bytes(a)},
         a);
}

bool has_few_tokens(const DeviceRouterArgs& args) { return args.num_tokens <= kRouterFewTokens; }

// Blocks per token after the first kRouterFewTokens: as many as have experts and start at once, one on each
// SM.
unsigned blocks_per_token(const DeviceRouterArgs& args) {
  const int64_t sms = device_limits().num_sms;
  unsigned blocks = 1;
  while (blocks < 4 && 2 * blocks * args.num_tokens <= sms &&
         blocks * 2 * kExpertsAhead < args.rule.num_experts)
    blocks *= 2;
  return blocks;
}

// The kernel for rounds that the router sends, and the kernel for other rounds: a step can use either one,
// whichever was rehearsed.
void load_blocks() {
  const KernelAttributes attributes{.shared_bytes = block_shared_bytes(static_cast<int>(kMaxBlockExperts))};
  prepare_kernel(norm_route_block_kernel<NoSender>, attributes);
  prepare_kernel(norm_route_block_kernel<RoundSender>, attributes);
}
template <class Sender>
void launch_blocks(const typename Sender::Args& a, const DeviceRouterArgs& args) {
  load_blocks();
  const unsigned blocks = blocks_per_token(args);
  launch("norm_route", norm_route_block_kernel<Sender>,
         {dim3(blocks, static_cast<unsigned>(args.num_tokens)), dim3(kBlockThreads),
          static_cast<size_t>(block_shared_bytes(a.num_experts)), blocks},
         a);
}

// A rank that lacks some of the round's tokens sends by another kernel, which a rehearsal does not reach.
void norm_route_and_send(const NormRouteArgs& a, const DeviceRouterArgs& args) {
  const A2aRound& round = *args.round;
  FP4MOE_CHECK(norm_route_sends(args), "the router cannot send this round");
  if (args.round_is_direct) {
    cuda::load_send_direct();
    return launch_few<LaneSender>({a, round}, args.num_tokens);
  }
  cuda::load_send();
  launch_blocks<RoundSender>({a, round, cuda::send_flags_per_token(round)}, args);
}

}  // namespace

bool norm_route_sends(const DeviceRouterArgs& args) {
  const A2aRound& round = *args.round;
  if (args.num_tokens != round.num_tokens || args.num_tokens != round.num_own) return false;
  if (args.round_is_direct) return has_few_tokens(args) && round.first_token == 0;
  return !has_few_tokens(args) && round.shape.row_format == A2aRowFormat::kBf16 &&
         round.group.plane == nullptr && !round.shape.is_staged && cuda::send_flags_per_token(round) > 0;
}

bool norm_route_fits(const DeviceRouterArgs& args) {
  const int64_t experts = args.rule.num_experts, bytes = experts * args.hidden_size * 2;
  if (args.hidden_size % kVector != 0) return false;
  if (has_few_tokens(args))
    return args.words != nullptr && args.hidden_size <= kMaxVectors * 32 * kVector * kParts &&
           bytes * args.num_tokens <= kMaxBytesInAll;
  return args.hidden_size <= kBlockVectors * 32 * kVector * kParts && experts <= kMaxBlockExperts &&
         bytes * args.num_tokens <= kMaxBlockBytes;
}

void norm_route(const DeviceRouterArgs& args) {
  const RmsNormArgs& norm = *args.norm;
  NormRouteArgs a = {.x = norm.x,
                     .norm_weight = norm.weight,
                     .out_act = static_cast<bf16*>(norm.out_act.data),
                     .out_f32 = norm.out_f32,
                     .weight = args.weight,
                     .bias = args.bias,
                     .rule = args.rule,
                     .logits = args.logits,
                     .out = {args.ids, args.weights, args.count},
                     .eps = norm.eps,
                     .inverse_hidden = 1 / static_cast<float>(args.hidden_size),
                     .hidden_size = static_cast<int>(args.hidden_size),
                     .num_experts = static_cast<int>(args.rule.num_experts),
                     .words = args.words};
  a.rule.correction_bias = args.correction_bias;
  if (args.round != nullptr) return norm_route_and_send(a, args);
  has_few_tokens(args) ? launch_few<NoSender>(a, args.num_tokens) : launch_blocks<NoSender>(a, args);
}

}  // namespace fp4moe
