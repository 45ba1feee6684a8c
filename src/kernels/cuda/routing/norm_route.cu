// Normalises and routes tokens in one launch: for few tokens a cluster of 8 blocks per token, or four that
// share many experts; for more, one to four blocks per token.
//
// Computes:  y = x / sqrt(mean(x^2) + eps) * weight as bf16 and f32; logits = y W^T (+ bias); then
//            choose_experts() for each token.
// Shapes:    x [T, H] f32, H a multiple of 8; W [E, H] bf16. Up to 16 tokens: H up to 8192, each block of a
//            cluster holds E rows of an eighth of H in shared memory. More tokens: H up to 4096.
// Bytes:     2 E H of weights for each token (from the L2 after the first), T H (4 + 2 + 4) of x and y.
// Flops:     2 T E H as f32 multiply-adds.
// Bound:     latency: the weights are loaded before the wait (with one to four blocks per token, those of 16
//            experts per block); then x is read, the sums are exchanged once, and the experts are chosen.
// Numerics:  f32 sums of x * weight * W, added over a lane's columns in order, over a warp's lanes by halving
//            and over the eighths in order; then multiplied by 1 / rms. The same bits for every T.
// Measured:  H200, E = 32, H = 2880, launches that overlap: 4.3 us for 1 token, 4.9 for 8 and 6.2 for 64;
//            for 64, separate gate and choice take 3.9 and 2.4, without the norm.
#include "kernels/cuda/routing/norm_route.h"

#include <algorithm>

#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/routing/router_choice.cuh"

namespace fp4moe {
namespace {

constexpr int kBlocks = 8;  // blocks in a cluster
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kVector = 8;                            // columns that a lane reads at once
constexpr int kMaxVectors = 4;                        // vectors per lane
constexpr int64_t kMaxClusters = kRouterArrivals;     // with more tokens, one to four blocks per token
constexpr int kBlockThreads = 2 * kBlocks * 32;       // threads, with one block per token
constexpr int kBlockVectors = 2, kExpertsAhead = 8;   // per lane, with one block per token
constexpr int64_t kMaxBlockExperts = 512;             // with one block per token: experts that fit
constexpr int64_t kMaxBlockBytes = 24 * 1024 * 1024;  // with one block per token: weights read in all
constexpr int64_t kMaxWeightBytes = 128 * 1024;       // weights in one block of a cluster
constexpr int64_t kMaxBytesInAll = 3 * 1024 * 1024;   // with clusters: weights read in all
constexpr int kExpertsAtOnce = 4;
constexpr int64_t kMinSplitExperts = 128;  // with that many experts, kSplits clusters per token share them
constexpr int kSplits = 4;

struct NormRouteArgs {
  const float *x, *norm_weight;
  bf16* out_act;
  float* out_f32;
  const bf16* weight;
  const float* bias;  // or null
  RoutingRule rule;
  float* logits;
  Choices out;
  float eps;
  int hidden_size, num_experts;
  int cluster_experts;  // experts of a cluster; the last cluster can have fewer
  uint32_t* arrivals;   // [T], with several clusters per token: those that have written their logits
};

// The experts [first, first + count) of a cluster.
struct Experts {
  int first, count;
  __device__ Experts(const NormRouteArgs& a, int cluster)
      : first(cluster * a.cluster_experts), count(min(a.cluster_experts, a.num_experts - first)) {}
};

// The vectors [begin, end) of a row that a block processes.
struct Part {
  int begin, end;
  __host__ __device__ Part(int num_vectors, int block)
      : begin(num_vectors * block / kBlocks), end(num_vectors * (block + 1) / kBlocks) {}
};
__host__ __device__ constexpr int max_part(int num_vectors) { return (num_vectors + kBlocks - 1) / kBlocks; }

// A block's shared memory, in order, for a cluster of C experts: weights [C][max_part] vectors; the values
// that all blocks send to this one: squares [kBlocks] and, in block 0, sums [kBlocks][C]; logits [E]; the
// memory for the choice.
__host__ __device__ constexpr int weight_bytes(int cluster_experts, int num_vectors) {
  return cluster_experts * max_part(num_vectors) * 16;
}
int shared_bytes(const NormRouteArgs& a) {
  return weight_bytes(a.cluster_experts, a.hidden_size / kVector) +
         4 * (kBlocks * (1 + a.cluster_experts) + a.num_experts + choice_words(a.num_experts));
}

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

// A lane's columns: vectors lane, lane + 32, ... of the part. Every warp has all columns of the part.
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

// Copies the weights. Each lane copies those that it will multiply itself, so that no barrier is needed.
template <int kVectors>
__device__ __forceinline__ void copy_weights(const NormRouteArgs& a, const Experts& experts, const Part& part,
                                             uint4* weights) {
  const int pitch = max_part(a.hidden_size / kVector);
  for (int e = static_cast<int>(threadIdx.x) / 32; e < experts.count; e += kWarps)
    Columns<kVectors>::each(part, [&](int, int v) {
      ptx::cp_async16(ptx::shared_address(weights + e * pitch + v - part.begin),
                      a.weight + static_cast<int64_t>(experts.first + e) * a.hidden_size + v * kVector, 16);
    });
  ptx::cp_async_commit();
}

__device__ __forceinline__ float dot(const float (&x)[kVector], const uint4& w, float sum) {
  const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum = fmaf(x[2 * i + 1], ptx::high_of_pair(pairs[i]), fmaf(x[2 * i], ptx::low_of_pair(pairs[i]), sum));
  return sum;
}

// Computes this block's part of the sums of its cluster's experts and sends it to block 0.
template <int kVectors>
__device__ __forceinline__ void multiply(const NormRouteArgs& a, int num_experts, const Part& part,
                                         const Columns<kVectors>& x, const uint4* weights,
                                         const float* sums) {
  const int warp = static_cast<int>(threadIdx.x) / 32, pitch = max_part(a.hidden_size / kVector);
  for (int first = warp; first < num_experts; first += kWarps * kExpertsAtOnce) {
    float sum[kExpertsAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kExpertsAtOnce; ++j) {
      const int e = first + j * kWarps < num_experts ? first + j * kWarps : first;  // any valid expert
      Columns<kVectors>::each(part, [&](int i, int v) {
        sum[j] = dot(x.values[i], weights[e * pitch + v - part.begin], sum[j]);
      });
    }
    constexpr int kLanes = 32 / kExpertsAtOnce;
    const float total = warp_totals(sum);
    const int lane = static_cast<int>(threadIdx.x) % 32, e = first + lane / kLanes * kWarps;
    if (lane % kLanes == 0 && e < num_experts) send(sums + blockIdx.x * a.cluster_experts + e, 0, total);
  }
}

// Writes vector v of a token's normalised row; x is already multiplied by the norm's weight.
__device__ __forceinline__ void write_vector(const NormRouteArgs& a, int64_t t, int v,
                                             const float (&x)[kVector], float inverse) {
  float y[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) y[j] = x[j] * inverse;
  const int64_t at = t * a.hidden_size + v * kVector;
  *reinterpret_cast<uint4*>(a.out_act + at) = {ptx::bf16_pair(y[0], y[1]), ptx::bf16_pair(y[2], y[3]),
                                               ptx::bf16_pair(y[4], y[5]), ptx::bf16_pair(y[6], y[7])};
  float4* f32 = reinterpret_cast<float4*>(a.out_f32 + at);
  f32[0] = {y[0], y[1], y[2], y[3]};
  f32[1] = {y[4], y[5], y[6], y[7]};
}

// Multiplies x by the norm's weight; returns the sum of the squares of the original x in the warp's columns.
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
  return warp_total(square);
}

__device__ __forceinline__ float inverse_rms(const NormRouteArgs& a, const float* squares) {
  float total = 0;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) total += squares[i];
  return 1 / sqrtf(total / static_cast<float>(a.hidden_size) + a.eps);
}

// Writes the logits of a cluster's experts. Called by kCount threads.
template <int kCount>
__device__ __forceinline__ void put_logits(const NormRouteArgs& a, const Experts& experts, const float* sums,
                                           float inverse, float* logits) {
  for (int i = static_cast<int>(threadIdx.x); i < experts.count; i += kCount) {
    const int e = experts.first + i;
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kBlocks; ++part) sum += sums[part * a.cluster_experts + i];
    const float logit = sum * inverse + (a.bias != nullptr ? __ldg(a.bias + e) : 0);
    logits[e] = logit;
    a.logits[int64_t{blockIdx.y} * a.num_experts + e] = logit;
  }
}

// Returns in the last of a token's clusters whether it is the last, after its logits have been completed by
// those of the others. Called by all threads of a cluster's first block.
__device__ __forceinline__ bool completes_logits(const NormRouteArgs& a, float* logits) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)  // the last arrival sets the counter to zero again
    is_last = atomicInc(a.arrivals + blockIdx.y, gridDim.z - 1) == gridDim.z - 1;
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  for (int e = static_cast<int>(threadIdx.x); e < a.num_experts; e += kThreads)
    logits[e] = __ldcg(a.logits + int64_t{blockIdx.y} * a.num_experts + e);
  return true;
}

// Chooses the experts of token t. Called by one warp. The memory for the choice follows the logits.
__device__ __forceinline__ void choose(const NormRouteArgs& a, int64_t t, float* logits) {
  const int id =
      choose_by_warp(a.rule, logits, reinterpret_cast<uint32_t*>(logits + a.num_experts), a.out, t);
  const ExpertCountArgs& count = a.out.count;
  if (id >= 0 && count.counts != nullptr && t < *count.num_rows) add_count(count.counts, id, 1);
}

// Grid: (kBlocks, T, clusters per token). kVectors: vectors per lane, as many as a part needs, because those
// past its end cost almost as much as others.
template <int kVectors>
__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kThreads)
    norm_route_kernel(const __grid_constant__ NormRouteArgs a) {
  extern __shared__ __align__(16) uint8_t memory[];
  ptx::cluster_arrive();
  const int num_vectors = a.hidden_size / kVector, block = static_cast<int>(blockIdx.x);
  uint4* weights = reinterpret_cast<uint4*>(memory);
  float* squares = reinterpret_cast<float*>(memory + weight_bytes(a.cluster_experts, num_vectors));
  float* sums = squares + kBlocks;
  float* logits = sums + kBlocks * a.cluster_experts;
  const Part part(num_vectors, block);
  const Experts experts(a, static_cast<int>(blockIdx.z));
  copy_weights<kVectors>(a, experts, part, weights);
  Columns<kVectors> norm_weight, x;
  norm_weight.load(a.norm_weight, part);
  ptx::cluster_wait();  // all blocks have started: their shared memory can be written
  ptx::grid_dependency_wait();
  // Not launched sooner: the experts' blocks, which wait for whole SMs, would then run 15 % longer.
  ptx::grid_dependents_launch();
  x.load(a.x + int64_t{blockIdx.y} * a.hidden_size, part);
  const float square = square_and_weigh(norm_weight, x);
  if (threadIdx.x < kBlocks) send(squares + block, static_cast<int>(threadIdx.x), square);
  ptx::cp_async_wait<0>();
  multiply(a, experts.count, part, x, weights, sums);
  ptx::cluster_sync();
  const float inverse = inverse_rms(a, squares);
  if (block == 0) {
    put_logits<kThreads>(a, experts, sums, inverse, logits);
    const bool chooses = gridDim.z == 1 || completes_logits(a, logits);
    __syncthreads();
    if (chooses && threadIdx.x < 32) choose(a, blockIdx.y, logits);
  }
  if (blockIdx.z != 0) return;
  Columns<kVectors>::each(part, [&](int i, int v) {
    if (v % kWarps == static_cast<int>(threadIdx.x) / 32)
      write_vector(a, blockIdx.y, v, x.values[i], inverse);
  });
}

// ---- one to four blocks for each token -------------------------------------------------------------------
//
// Each warp of a block has the columns that one block of a cluster would have above; two warps have the same
// columns and split the block's experts. So the sums are the same, and are added in the same order. A token's
// blocks split the experts; the first one gets all sums.

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

// Shared memory: the parts' squares [kBlocks] and sums [kBlocks][E]; logits [E]; the memory for the choice.
__global__ void __launch_bounds__(kBlockThreads, 1)
    norm_route_block_kernel(const __grid_constant__ NormRouteArgs a) {
  extern __shared__ __align__(16) uint8_t memory[];
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  if (blocks > 1) ptx::cluster_arrive();
  ptx::grid_dependents_launch();
  float* squares = reinterpret_cast<float*>(memory);
  float* sums = squares + kBlocks;
  float* logits = sums + kBlocks * a.num_experts;
  const int warp = static_cast<int>(threadIdx.x) / 32, half = warp / kBlocks,
            t = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32;
  const Part part(a.hidden_size / kVector, warp % kBlocks);
  ExpertWeights weights;
  weights.load(a, part, 2 * kExpertsAhead * block + half);
  Columns<kBlockVectors> norm_weight, x;
  norm_weight.load(a.norm_weight, part);
  ptx::grid_dependency_wait();
  x.load(a.x + int64_t{t} * a.hidden_size, part);
  const float square = square_and_weigh(norm_weight, x);
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
      send(sums + warp % kBlocks * a.num_experts + e, 0, total);
  }
  if (blocks > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  const float inverse = inverse_rms(a, squares);
  if (block == 0) {
    put_logits<kBlockThreads>(a, Experts(a, 0), sums, inverse, logits);
    __syncthreads();
    if (warp == kBlocks) choose(a, t, logits);
  }
  if (half == 0 && block == blocks - 1)
    Columns<kBlockVectors>::each(part, [&](int i, int v) { write_vector(a, t, v, x.values[i], inverse); });
}
int block_shared_bytes(int num_experts) {
  return 4 * (kBlocks + (kBlocks + 1) * num_experts + choice_words(num_experts));
}

// Returns the kernel for parts of up to max_part vectors.
void (*cluster_kernel(int max_part))(NormRouteArgs) {
  return max_part <= 32 ? norm_route_kernel<1> : max_part <= 64 ? norm_route_kernel<2> : norm_route_kernel<4>;
}

// The clusters of a token.
int num_splits(const DeviceRouterArgs& args) {
  return args.arrivals != nullptr && args.rule.num_experts >= kMinSplitExperts ? kSplits : 1;
}
int64_t cluster_experts(const DeviceRouterArgs& args) {
  return ceil_div(args.rule.num_experts, int64_t{num_splits(args)});
}

bool takes_clusters(const DeviceRouterArgs& args) { return args.num_tokens <= kMaxClusters; }

// Blocks per token after the first kMaxClusters: as many as have experts and start at once, one on each SM.
unsigned blocks_per_token(const DeviceRouterArgs& args) {
  const int64_t sms = device_limits().num_sms;
  unsigned blocks = 1;
  while (blocks < 4 && 2 * blocks * args.num_tokens <= sms &&
         blocks * 2 * kExpertsAhead < args.rule.num_experts)
    blocks *= 2;
  return blocks;
}

}  // namespace

bool norm_route_fits(const DeviceRouterArgs& args) {
  const int64_t experts = args.rule.num_experts, bytes = experts * args.hidden_size * 2;
  if (!takes_clusters(args))
    return args.hidden_size % kVector == 0 && args.hidden_size <= kBlockVectors * 32 * kVector * kBlocks &&
           experts <= kMaxBlockExperts && bytes * args.num_tokens <= kMaxBlockBytes;
  return args.hidden_size % kVector == 0 && args.hidden_size <= kMaxVectors * 32 * kVector * kBlocks &&
         bytes * args.num_tokens <= kMaxBytesInAll &&
         cluster_experts(args) * max_part(static_cast<int>(args.hidden_size / kVector)) * 16 <=
             kMaxWeightBytes;
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
                     .hidden_size = static_cast<int>(args.hidden_size),
                     .num_experts = static_cast<int>(args.rule.num_experts),
                     .cluster_experts = static_cast<int>(args.rule.num_experts),
                     .arrivals = args.arrivals};
  a.rule.correction_bias = args.correction_bias;
  if (!takes_clusters(args)) {
    const unsigned blocks = blocks_per_token(args);
    return launch("norm_route", norm_route_block_kernel,
                  {dim3(blocks, static_cast<unsigned>(args.num_tokens)), dim3(kBlockThreads),
                   static_cast<size_t>(block_shared_bytes(a.num_experts)), blocks},
                  a);
  }
  a.cluster_experts = static_cast<int>(cluster_experts(args));
  const auto kernel = cluster_kernel(max_part(a.hidden_size / kVector));
  prepare_kernel(kernel, {.shared_bytes = device_limits().shared_bytes_per_block});
  launch("norm_route", kernel,
         {dim3(kBlocks, static_cast<unsigned>(args.num_tokens), static_cast<unsigned>(num_splits(args))),
          dim3(kThreads), static_cast<size_t>(shared_bytes(a))},
         a);
}

}  // namespace fp4moe
