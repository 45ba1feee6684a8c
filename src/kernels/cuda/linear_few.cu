// Dense linear of few tokens, optionally with the RMS norm of its input inside.
//
// Computes:  out [T, N] f32 (+)= x [T, K] W^T + bias, W [N, K] bf16 row-major; x is bf16, or norm(residual).
// Shapes:    T <= 16, K a multiple of 32, any N; x whole in shared memory.
// Bytes:     2 N K, once from HBM; T (2 K + 4 N) beside it.
// Flops:     2 T N K, on mma.sync with the tokens as its 16 rows and weights as its 8 columns.
// Bound:     HBM. Each block streams its share of the rows through a ring of bulk copies that fills the SM's
//            shared memory, and starts before it waits for the kernel whose output it reads: behind another
//            kernel most of a 25 MB matrix is in flight by then. A bulk copy costs the SM 44 ns whatever its
//            size (512 B: 1.5 TB/s in all, 1 KiB: 3.1), so a copy is up to 3 KB of a row.
// Numerics:  exact products, f32 sums: a warp's k's (32 of every 256 of a chunk) one after the other, then
// the 8
//            warps in order, then bias, then what out holds. The same bits for a token whatever T is. With
//            the norm inside, x = bf16(residual * weight), and 1 / rms multiplies the sum.
#include "kernels/cuda/linear_few.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx_mma.cuh"
#include "kernels/cuda/ptx_sm90.cuh"

namespace fp4moe {
namespace {

constexpr int kWarps = 8;  // that multiply; one more copies
constexpr int kThreads = kWarps * 32;
constexpr int kTileRows = 8;    // weight rows of a stage
constexpr int kGroupTiles = 5;  // whose sums are kept until the warps' are added
constexpr int kGroupRows = kGroupTiles * kTileRows;
constexpr int kMaxChunk = 1536;  // k's of a stage
constexpr int kMaxStages = 16, kMinStages = 2;
// A block takes no more unless its ring would be shorter than kGoodStages: two blocks share an SM, so that
// the next linear fills its ring while this one ends.
constexpr int kMaxSharedBytes = 112 * 1024, kGoodStages = 4;
constexpr int kMaxTokens = 16;

struct FewArgs {
  const bf16* weight;        // [n, k]
  const float* bias;         // [n] or null
  const bf16* x;             // [num_tokens, k]; with a norm: null
  const float* residual;     // [num_tokens, k]: with a norm
  const float* norm_weight;  // [k]
  float* out;                // [num_tokens, n]
  float eps;
  int num_tokens, n, k;
  int num_stages;
  bool accumulate;
};

// Bytes of a row of `k` in shared memory: two rows lie in different banks.
__host__ __device__ constexpr int pitch_of(int k) { return k * 2 + (k % 64 == 0 ? 64 : 0); }
// K cut into equal chunks, multiples of 32.
__host__ __device__ constexpr int chunk_of(int k) {
  const int num_chunks = (k + kMaxChunk - 1) / kMaxChunk;
  return (k / 32 + num_chunks - 1) / num_chunks * 32;
}

// Bytes from the start of a block's shared memory.
struct FewLayout {
  int chunk, stage_pitch, stage_bytes, x, x_pitch, sums, squares, barriers, end;
};

__host__ __device__ constexpr FewLayout few_layout(int num_tokens, int k, int num_stages) {
  FewLayout layout{};
  layout.chunk = chunk_of(k);
  layout.stage_pitch = pitch_of(layout.chunk);
  layout.stage_bytes = kTileRows * layout.stage_pitch;
  layout.x = num_stages * layout.stage_bytes;
  layout.x_pitch = pitch_of(k);
  layout.sums = layout.x + num_tokens * layout.x_pitch;
  layout.squares = layout.sums + kWarps * num_tokens * kGroupRows * 4;
  layout.barriers = layout.squares + kWarps * kMaxTokens * 4;
  layout.end = layout.barriers + (2 * kMaxStages + 1) * 8;
  return layout;
}

// A block's share of the rows.
struct Share {
  int begin, end;
  __device__ explicit Share(int n) {
    const int64_t block = blockIdx.x, blocks = gridDim.x;
    begin = static_cast<int>(n * block / blocks);
    end = static_cast<int>(n * (block + 1) / blocks);
  }
};

struct Ring {
  uint64_t *full, *empty;
  int num_stages, stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == num_stages) stage = 0, parity ^= 1;
  }
};

__device__ void copy_weights(const FewArgs& a, const FewLayout& layout, uint8_t* shared, Ring ring) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Share share(a.n);
  for (int row = share.begin; row < share.end; row += kTileRows) {
    const int rows = min(kTileRows, share.end - row);
    for (int k = 0; k < a.k; k += layout.chunk) {
      const uint32_t row_bytes = static_cast<uint32_t>(min(layout.chunk, a.k - k)) * 2;
      ptx::mbarrier_wait(&ring.empty[ring.stage], ring.parity ^ 1);
      if (lane == 0)
        ptx::mbarrier_arrive_expect_tx(&ring.full[ring.stage], static_cast<uint32_t>(rows) * row_bytes);
      __syncwarp();
      if (lane < rows)
        ptx::bulk_load(shared + ring.stage * layout.stage_bytes + lane * layout.stage_pitch,
                       a.weight + static_cast<int64_t>(row + lane) * a.k + k, row_bytes,
                       &ring.full[ring.stage]);
      ring.advance();
    }
  }
}

// One bulk copy a token.
__device__ void load_x(const FewArgs& a, const FewLayout& layout, uint8_t* shared, uint64_t* barrier) {
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(a.num_tokens * a.k * 2));
  if (t < 32) __syncwarp();
  if (t < a.num_tokens)
    ptx::bulk_load(shared + layout.x + t * layout.x_pitch, a.x + static_cast<int64_t>(t) * a.k,
                   static_cast<uint32_t>(a.k) * 2, barrier);
  ptx::mbarrier_wait(barrier, 0);
}

__device__ void prefetch_bias(const FewArgs& a) {
  constexpr int kLine = 128 / sizeof(float);
  const Share share(a.n);
  if (a.bias == nullptr) return;
  for (int i = share.begin + static_cast<int>(threadIdx.x) * kLine; i < share.end; i += kThreads * kLine)
    ptx::prefetch_l2(a.bias + i);
}

constexpr int kLoads = 4, kTokensAtOnce = 2;  // of load_normed: what is in flight per thread

// The norm's weights that a thread needs first: loaded before the wait.
struct NormWeights {
  float4 first[kLoads];
  __device__ explicit NormWeights(const FewArgs& a) {
    const float4* weight = reinterpret_cast<const float4*>(a.norm_weight);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kThreads;
      first[j] = i < a.k / 4 ? __ldg(weight + i) : float4{};
    }
  }
};

// x = bf16(residual * weight), and each warp's part of the sum of squares.
__device__ void load_normed(const FewArgs& a, const FewLayout& layout, const NormWeights& weights,
                            uint8_t* shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, vectors = a.k / 4;
  float* squares = reinterpret_cast<float*>(shared + layout.squares);
  const float4* weight = reinterpret_cast<const float4*>(a.norm_weight);
  const float4* residual = reinterpret_cast<const float4*>(a.residual);
  for (int first = 0; first < a.num_tokens; first += kTokensAtOnce) {
    float sums[kTokensAtOnce] = {};
    for (int begin = thread; begin < vectors; begin += kLoads * kThreads) {
      float4 v[kTokensAtOnce][kLoads], w[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int i = begin + j * kThreads;
        w[j] = begin == thread ? weights.first[j] : i < vectors ? __ldg(weight + i) : float4{};
#pragma unroll
        for (int t = 0; t < kTokensAtOnce; ++t)
          v[t][j] = i < vectors && first + t < a.num_tokens
                        ? __ldcg(residual + static_cast<int64_t>(first + t) * vectors + i)
                        : float4{};
      }
#pragma unroll
      for (int t = 0; t < kTokensAtOnce; ++t) {
        if (first + t >= a.num_tokens) break;
        uint2* to = reinterpret_cast<uint2*>(shared + layout.x + (first + t) * layout.x_pitch);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const float4 e = v[t][j];
          sums[t] += e.x * e.x + e.y * e.y + e.z * e.z + e.w * e.w;
          if (const int i = begin + j * kThreads; i < vectors)
            to[i] = {ptx::bf16_pair(e.x * w[j].x, e.y * w[j].y), ptx::bf16_pair(e.z * w[j].z, e.w * w[j].w)};
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokensAtOnce; ++t) {
      for (int offset = 16; offset > 0; offset /= 2) sums[t] += __shfl_xor_sync(~0u, sums[t], offset);
      if (lane == 0 && first + t < a.num_tokens) squares[warp * kMaxTokens + first + t] = sums[t];
    }
  }
  ptx::named_barrier(1, kThreads);
}

// c += the tokens times a stage's rows, over this warp's k's: 32 of every 256. `x` is where the stage's k's
// start.
template <bool kTwoHalves>
__device__ __forceinline__ void multiply_stage(const uint8_t* stage, int stage_pitch, const uint8_t* x,
                                               int x_pitch, int num_tokens, int num_k, float (&c)[2][4]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, at = (warp * 32 + lane % 4 * 8) * 2;
  const bool has_a = g < num_tokens, has_b = kTwoHalves && g + 8 < num_tokens;
  const uint8_t *row = stage + g * stage_pitch + at, *x_a = x + g * x_pitch + at, *x_b = x_a + 8 * x_pitch;
#pragma unroll 2
  for (int k = warp * 32; k < num_k; k += kWarps * 32) {
    uint4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};  // tokens g and g + 8
    if (has_a) a = *reinterpret_cast<const uint4*>(x_a);
    if (has_b) b = *reinterpret_cast<const uint4*>(x_b);
    const uint4 w = *reinterpret_cast<const uint4*>(row);
    ptx::mma_bf16(c[0], a.x, b.x, a.y, b.y, w.x, w.y);
    ptx::mma_bf16(c[1], a.z, b.z, a.w, b.w, w.z, w.w);
    row += kWarps * 64, x_a += kWarps * 64, x_b += kWarps * 64;
  }
}

// What is added to a sum. Loaded before the sum is ready: at the end of the kernel each load would cost as
// much as 2 MB of weights.
struct Addend {
  float bias = 0, before = 0;  // before: what out holds
};

__device__ Addend addend_of(const FewArgs& a, int first, int rows, int i) {
  Addend addend;
  if (i >= a.num_tokens * rows) return addend;
  const int row = first + i % rows;
  if (a.bias != nullptr) addend.bias = __ldg(a.bias + row);
  if (a.accumulate) addend.before = __ldcg(a.out + static_cast<int64_t>(i / rows) * a.n + row);
  return addend;
}

// Adds the warps' sums of a group in their order, and writes the outputs. `addend` is of this thread's first
// one.
template <bool kNorm>
__device__ void write_outputs(const FewArgs& a, const FewLayout& layout, const uint8_t* shared, int first,
                              int rows, Addend addend) {
  const float* sums = reinterpret_cast<const float*>(shared + layout.sums);
  const float* squares = reinterpret_cast<const float*>(shared + layout.squares);
  for (int i = static_cast<int>(threadIdx.x); i < a.num_tokens * rows; i += kThreads) {
    if (i >= kThreads) addend = addend_of(a, first, rows, i);
    const int t = i / rows, r = i % rows;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[(warp * a.num_tokens + t) * kGroupRows + r];
    if (kNorm) {
      float square = 0;
      for (int warp = 0; warp < kWarps; ++warp) square += squares[warp * kMaxTokens + t];
      sum *= 1 / sqrtf(square / static_cast<float>(a.k) + a.eps);
    }
    a.out[static_cast<int64_t>(t) * a.n + first + r] = sum + addend.bias + addend.before;
  }
}

template <bool kTwoHalves, bool kNorm>
__device__ void multiply(const FewArgs& a, const FewLayout& layout, uint8_t* shared, Ring ring) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  float* sums =
      reinterpret_cast<float*>(shared + layout.sums) + warp * a.num_tokens * kGroupRows + lane % 4 * 2;
  const Share share(a.n);
  for (int first = share.begin; first < share.end; first += kGroupRows) {
    const int rows = min(kGroupRows, share.end - first);
    const Addend addend = addend_of(a, first, rows, static_cast<int>(threadIdx.x));
    for (int row = 0; row < rows; row += kTileRows) {
      float c[2][4] = {};
      for (int k = 0; k < a.k; k += layout.chunk) {
        ptx::mbarrier_wait(&ring.full[ring.stage], ring.parity);
        multiply_stage<kTwoHalves>(shared + ring.stage * layout.stage_bytes, layout.stage_pitch,
                                   shared + layout.x + k * 2, layout.x_pitch, a.num_tokens,
                                   min(layout.chunk, a.k - k), c);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&ring.empty[ring.stage]);
        ring.advance();
      }
      if (g < a.num_tokens)
        *reinterpret_cast<float2*>(sums + g * kGroupRows + row) = {c[0][0] + c[1][0], c[0][1] + c[1][1]};
      if (kTwoHalves && g + 8 < a.num_tokens)
        *reinterpret_cast<float2*>(sums + (g + 8) * kGroupRows + row) = {c[0][2] + c[1][2],
                                                                         c[0][3] + c[1][3]};
    }
    ptx::named_barrier(1, kThreads);
    write_outputs<kNorm>(a, layout, shared, first, rows, addend);
    ptx::named_barrier(1, kThreads);
  }
}

template <bool kTwoHalves, bool kNorm>
__global__ void __launch_bounds__(kThreads + 32, 1) linear_few_kernel(const __grid_constant__ FewArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  const FewLayout layout = few_layout(a.num_tokens, a.k, a.num_stages);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + layout.barriers);
  const Ring ring{barriers, barriers + kMaxStages, a.num_stages};
  uint64_t* x_barrier = barriers + 2 * kMaxStages;
  ptx::grid_dependents_launch();
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.num_stages; ++i) {
      ptx::mbarrier_init(&ring.full[i], 1);
      ptx::mbarrier_init(&ring.empty[i], kWarps);
    }
    ptx::mbarrier_init(x_barrier, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    copy_weights(a, layout, shared, ring);
    return;
  }
  prefetch_bias(a);
  if constexpr (kNorm) {
    const NormWeights weights(a);
    ptx::grid_dependency_wait();
    load_normed(a, layout, weights, shared);
  } else {
    ptx::grid_dependency_wait();
    load_x(a, layout, shared, x_barrier);
  }
  multiply<kTwoHalves, kNorm>(a, layout, shared, ring);
}

// Stages for `num_tokens`, of up to `wanted`; fewer than kMinStages: it does not fit.
int num_stages(int64_t num_tokens, int64_t k, int64_t wanted) {
  const FewLayout layout = few_layout(static_cast<int>(num_tokens), static_cast<int>(k), 0);
  const auto within = [&](int bytes) { return (bytes - layout.end) / layout.stage_bytes; };
  const int most = within(device_limits().shared_bytes_per_block);
  const int stages = std::min(most, std::max(within(kMaxSharedBytes), kGoodStages));
  return static_cast<int>(
      std::min<int64_t>(std::min(stages, kMaxStages), std::max<int64_t>(wanted, kMinStages)));
}

using FewKernel = void (*)(FewArgs);

// The kernel may use all shared memory; told to the driver once.
FewKernel kernel_of(bool two_halves, bool norm) {
  static const auto allow = [](FewKernel kernel) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         device_limits().shared_bytes_per_block);
    return kernel;
  };
  static const FewKernel kernels[2][2] = {
      {allow(linear_few_kernel<false, false>), allow(linear_few_kernel<false, true>)},
      {allow(linear_few_kernel<true, false>), allow(linear_few_kernel<true, true>)}};
  return kernels[two_halves][norm];
}

void launch_few(FewArgs a, bool norm) {
  const int blocks = std::min(a.n, device_limits().num_sms);
  if (blocks == 0 || a.num_tokens == 0) return;
  const int64_t stages = ceil_div(ceil_div(a.n, blocks), kTileRows) * ceil_div(a.k, chunk_of(a.k));
  a.num_stages = num_stages(a.num_tokens, a.k, stages);
  FP4MOE_CHECK(a.num_stages >= kMinStages, "linear_few of T=" + std::to_string(a.num_tokens) +
                                               " K=" + std::to_string(a.k) + " does not fit");
  const FewLayout layout = few_layout(a.num_tokens, a.k, a.num_stages);
  launch("linear_few", kernel_of(a.num_tokens > 8, norm),
         {dim3(static_cast<unsigned>(blocks)), dim3(kThreads + 32), static_cast<size_t>(layout.end)}, a);
}

FewArgs few_args(const LinearArgs& l) {
  return {.weight = l.weight,
          .bias = l.bias,
          .x = static_cast<const bf16*>(l.x.data),
          .residual = nullptr,
          .norm_weight = nullptr,
          .out = l.out,
          .eps = 0,
          .num_tokens = static_cast<int>(l.x.rows),
          .n = static_cast<int>(l.n),
          .k = static_cast<int>(l.x.cols),
          .num_stages = 0,
          .accumulate = l.accumulate};
}

}  // namespace

bool linear_few_fits(int64_t num_tokens, int64_t k) {
  return num_tokens <= kMaxTokens && k > 0 && k % 32 == 0 && k <= (1 << 17) &&
         num_stages(num_tokens, k, kMinStages) >= kMinStages;
}

void linear_few(const LinearArgs& args) { launch_few(few_args(args), /*norm=*/false); }

void norm_linear_few(const NormLinearArgs& args) {
  FewArgs a = few_args(args.linear);
  a.x = nullptr;
  a.residual = args.norm.x;
  a.norm_weight = args.norm.weight;
  a.eps = args.norm.eps;
  launch_few(a, /*norm=*/true);
}

}  // namespace fp4moe
