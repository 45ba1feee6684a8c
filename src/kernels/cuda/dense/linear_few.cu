// Dense linear layers for few tokens, optionally with the RMS norm of the input inside.
//
// Computes:  out [T, N] f32 (+)= x [T, K] W^T + bias, W [N, K] bf16 row-major; x is bf16, or norm(residual).
// Shapes:    T <= 16 (with the norm <= 4), K a multiple of 32, any N; all of x in shared memory.
// Bytes:     2 N K, once from HBM; plus T (2 K + 4 N).
// Flops:     2 T N K, on mma.sync with the weights as its 16 rows and the tokens as its 8 columns.
// Bound:     HBM. Each block streams its share of the rows through a ring of bulk copies, and starts before
//            it waits for the kernel whose output it reads. A bulk copy costs the SM 44 ns whatever its size
//            (512 B: 1.5 TB/s in all, 1 KiB: 3.1 TB/s), so a copy is up to 3 KB of a row.
// Numerics:  exact products, f32 sums: two chains over a warp's k's (32 of every 256 of a chunk), the sum of
//            both, then the 8 warps in order, then bias, then out's old value. A token has the same bits for
//            every T. With the norm inside, x = bf16(residual * weight), and 1 / rms multiplies the sum.
#include "kernels/cuda/dense/linear_few.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/dense/linear_few_layout.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe {
namespace {

using namespace few_linear;

// Named barriers.
constexpr int kMultiplyBarrier = 1;  // for the warps that multiply
constexpr int kClearedBarrier = 2;   // for all warps

enum class TokenClass { kLone, kUpTo8, kUpTo16 };  // kLone: T <= kFewLoneTokens

struct FewArgs {
  const bf16* weight;        // [n, k]
  const float* bias;         // [n] or null
  const bf16* x;             // [num_tokens, k]; with a norm: null
  const float* residual;     // [num_tokens, k]: with a norm
  const float* norm_weight;  // [k]
  float* out;                // [num_tokens, n]
  float eps;
  int num_tokens, n, k;
  FewLayout layout;
  bool accumulate;
};

// A block's share of the rows.
struct Share {
  int begin, end;
  __device__ explicit Share(int n) {
    const int rows = n / static_cast<int>(gridDim.x), rest = n % static_cast<int>(gridDim.x);
    const int block = static_cast<int>(blockIdx.x);
    begin = block * rows + min(block, rest);
    end = begin + rows + (block < rest ? 1 : 0);
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

__device__ void copy_weights(const FewArgs& a, uint8_t* shared, const Share& share, Ring ring) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int tile = share.begin; tile < share.end; tile += kTileRows) {
    const int halves = share.end - tile > kStageRows ? 2 : 1;
    for (int i = 0; i < a.layout.num_chunks * halves; ++i) {
      const int k = i / halves * a.layout.chunk, row = tile + i % halves * kStageRows;
      const int rows = min(kStageRows, share.end - row);
      const uint32_t row_bytes = static_cast<uint32_t>(min(a.layout.chunk, a.k - k)) * 2;
      ptx::mbarrier_wait(&ring.empty[ring.stage], ring.parity ^ 1);
      if (lane == 0)
        ptx::mbarrier_arrive_expect_tx(&ring.full[ring.stage], static_cast<uint32_t>(rows) * row_bytes);
      __syncwarp();
      if (lane < rows)
        ptx::bulk_load(shared + ring.stage * a.layout.stage_bytes + lane * a.layout.stage_pitch,
                       a.weight + static_cast<int64_t>(row + lane) * a.k + k, row_bytes,
                       &ring.full[ring.stage]);
      ring.advance();
    }
  }
}

// Clears the bytes after the last chunk in every stage, which longer chunks may overwrite, and the bytes
// after every row of x, so that the products of the padding are zeros.
__device__ void clear_padding(const FewArgs& a, uint8_t* shared) {
  const auto clear = [&](uint8_t* rows, int num_rows, int pitch, int from, int to) {
    const int words = (to - from) / 4;
    for (int i = static_cast<int>(threadIdx.x); i < num_rows * words; i += kThreads)
      *reinterpret_cast<uint32_t*>(rows + i / words * pitch + from + i % words * 4) = 0;
  };
  if (a.layout.padded_k == a.k) return;
  clear(shared, a.layout.num_stages * kStageRows, a.layout.stage_pitch, a.layout.last_chunk * 2,
        a.layout.padded_chunk * 2);
  clear(shared + a.layout.x, a.num_tokens, a.layout.x_pitch, a.k * 2, a.layout.padded_k * 2);
  ptx::fence_proxy_async();
}

// Loads x, with one bulk copy per token.
__device__ void load_x(const FewArgs& a, uint8_t* shared, uint64_t* barrier) {
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(a.num_tokens * a.k * 2));
  if (t < 32) __syncwarp();
  if (t < a.num_tokens)
    ptx::bulk_load(shared + a.layout.x + t * a.layout.x_pitch, a.x + static_cast<int64_t>(t) * a.k,
                   static_cast<uint32_t>(a.k) * 2, barrier);
  ptx::mbarrier_wait(barrier, 0);
}

__device__ void prefetch_bias(const FewArgs& a, const Share& share) {
  constexpr int kLine = 128 / sizeof(float);
  if (a.bias == nullptr) return;
  for (int i = share.begin + static_cast<int>(threadIdx.x) * kLine; i < share.end; i += kThreads * kLine)
    ptx::prefetch_l2(a.bias + i);
}

// In a pass of load_normed: the vectors that a thread loads per token, and the number of tokens.
constexpr int kLoads = 4, kTokensAtOnce = 2;

// The norm's weights that a thread needs first: loaded before the grid dependency wait.
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

__device__ __forceinline__ float square_of(const float4& v) {
  return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}
__device__ __forceinline__ uint2 bf16_products(const float4& v, const float4& w) {
  return {ptx::bf16_pair(v.x * w.x, v.y * w.y), ptx::bf16_pair(v.z * w.z, v.w * w.w)};
}

// Computes x = bf16(residual * weight) in shared memory and each warp's part of the sum of squares. A row is
// K / 4 vectors of four floats, which the kThreads threads process in passes of kLoads vectors each, for
// kTokensAtOnce tokens that share the weights:
//
//   vector   0 ... 255   256 ... 511   512 ... 767   768 ... 1023   1024 ... 1279
//   thread   0 ... 255   0 ... 255     0 ... 255     0 ... 255      0 ... 255
//   load j   0           1             2             3              0
//   pass     0           0             0             0              1
//
// All loads of a pass are issued before the first is used: 2 x 4 of the residual and 4 of the weights, which
// are already in `weights` for pass 0.
__device__ void load_normed(const FewArgs& a, const NormWeights& weights, uint8_t* shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, vectors = a.k / 4;
  float* squares = reinterpret_cast<float*>(shared + a.layout.squares);
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
        uint2* x = reinterpret_cast<uint2*>(shared + a.layout.x + (first + t) * a.layout.x_pitch);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          sums[t] += square_of(v[t][j]);
          if (const int i = begin + j * kThreads; i < vectors) x[i] = bf16_products(v[t][j], w[j]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokensAtOnce; ++t) {
      for (int offset = 16; offset > 0; offset /= 2) sums[t] += __shfl_xor_sync(~0u, sums[t], offset);
      if (lane == 0 && first + t < a.num_tokens) squares[warp * kMaxTokens + first + t] = sums[t];
    }
  }
  ptx::named_barrier(kMultiplyBarrier, kThreads);
}

// Addresses of a lane's operands in one step: weights of rows g and g + 8, and x of tokens g and g + 8.
// Tokens past the last read an existing token; their columns are ignored.
struct Operands {
  const uint8_t *low, *high, *x, *x_high;
};

// Adds to c [half of the tokens][chain] two stages' rows times the tokens, over this warp's k's: 32 of every
// kStepK.
template <bool kTwoHalves>
__device__ __forceinline__ void multiply_chunk(Operands o, int num_pairs, float (&c)[2][2][4]) {
  const auto load = [](const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); };
#pragma unroll 3
  for (int pair = 0; pair < num_pairs; ++pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      constexpr int kStepBytes = kStepK * 2;
      const uint4 low = load(o.low + i * kStepBytes), high = load(o.high + i * kStepBytes);
      const uint4 x = load(o.x + i * kStepBytes);
      ptx::mma_bf16(c[0][0], {low.x, high.x, low.y, high.y}, x.x, x.y);
      ptx::mma_bf16(c[0][1], {low.z, high.z, low.w, high.w}, x.z, x.w);
      if (!kTwoHalves) continue;
      const uint4 y = load(o.x_high + i * kStepBytes);
      ptx::mma_bf16(c[1][0], {low.x, high.x, low.y, high.y}, y.x, y.y);
      ptx::mma_bf16(c[1][1], {low.z, high.z, low.w, high.w}, y.z, y.w);
    }
    o.low += kPairK * 2, o.high += kPairK * 2, o.x += kPairK * 2, o.x_high += kPairK * 2;
  }
}

// The values added to a sum. They are loaded before the sum is ready: at the end of the kernel, each load
// would cost as much as 2 MB of weights.
struct Addend {
  float bias = 0, before = 0;  // before: out's old value
};

__device__ Addend addend_of(const FewArgs& a, int first, int rows, int i) {
  Addend addend;
  if (i >= a.num_tokens * rows) return addend;
  const int row = first + i % rows;
  if (a.bias != nullptr) addend.bias = __ldg(a.bias + row);
  if (a.accumulate) addend.before = __ldcg(a.out + static_cast<int64_t>(i / rows) * a.n + row);
  return addend;
}

// Adds the warps' sums for a group in warp order, and writes the outputs. `addend` belongs to this thread's
// first output.
template <bool kNorm>
__device__ void write_outputs(const FewArgs& a, const uint8_t* shared, int first, int rows, Addend addend) {
  const float* sums = reinterpret_cast<const float*>(shared + a.layout.sums);
  const float* squares = reinterpret_cast<const float*>(shared + a.layout.squares);
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

// Puts a warp's sums for a tile into `sums` [T][kGroupRows], beginning at row `row` of the group.
template <bool kTwoHalves>
__device__ __forceinline__ void keep_sums(const float (&c)[2][2][4], int num_tokens, int row, float* sums) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, q = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < (kTwoHalves ? 2 : 1); ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int t = half * 8 + q * 2 + i % 2; t < num_tokens)
        sums[t * kGroupRows + row + g + i / 2 * kStageRows] = c[half][0][i] + c[half][1][i];
}

template <bool kTwoHalves, bool kNorm>
__device__ void multiply(const FewArgs& a, uint8_t* shared, const Share& share, Addend addend, Ring ring) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, at = (warp * 32 + lane % 4 * 8) * 2;
  const uint8_t *x = shared + a.layout.x + min(g, a.num_tokens - 1) * a.layout.x_pitch + at,
                *x_high = shared + a.layout.x + min(g + 8, a.num_tokens - 1) * a.layout.x_pitch + at;
  const uint8_t* weights = shared + g * a.layout.stage_pitch + at;
  float* sums = reinterpret_cast<float*>(shared + a.layout.sums) + warp * a.num_tokens * kGroupRows;
  const int num_pairs = a.layout.padded_chunk / kPairK;
  for (int first = share.begin; first < share.end; first += kGroupRows) {
    const int rows = min(kGroupRows, share.end - first);
    if (first != share.begin) addend = addend_of(a, first, rows, static_cast<int>(threadIdx.x));
    for (int row = 0; row < rows; row += kTileRows) {
      const bool has_high = rows - row > kStageRows;
      float c[2][2][4] = {};
      for (int k = 0; k < a.k; k += a.layout.chunk) {
        const Ring low = ring;
        ptx::mbarrier_wait(&ring.full[ring.stage], ring.parity);
        if (has_high) {
          ring.advance();
          ptx::mbarrier_wait(&ring.full[ring.stage], ring.parity);
        }
        multiply_chunk<kTwoHalves>({weights + low.stage * a.layout.stage_bytes,
                                    weights + ring.stage * a.layout.stage_bytes, x + k * 2, x_high + k * 2},
                                   num_pairs, c);
        __syncwarp();
        if (lane == 0) {
          ptx::mbarrier_arrive(&ring.empty[low.stage]);
          if (has_high) ptx::mbarrier_arrive(&ring.empty[ring.stage]);
        }
        ring.advance();
      }
      keep_sums<kTwoHalves>(c, a.num_tokens, row, sums);
    }
    ptx::named_barrier(kMultiplyBarrier, kThreads);
    write_outputs<kNorm>(a, shared, first, rows, addend);
    ptx::named_barrier(kMultiplyBarrier, kThreads);
  }
}

__device__ void init_barriers(const FewArgs& a, const Ring& ring, uint64_t* x_barrier) {
  for (int i = 0; i < a.layout.num_stages; ++i) {
    ptx::mbarrier_init(&ring.full[i], 1);
    ptx::mbarrier_init(&ring.empty[i], kWarps);
  }
  ptx::mbarrier_init(x_barrier, 1);
  ptx::mbarrier_init_fence();
}

// A block's warps over time; === is the wait for the kernel whose output is x:
//
//   warps 0 ... 7                             warp 8
//   clear the padding                         initialise the barriers
//   --------------------- kClearedBarrier ---------------------------
//   prefetch the bias, load norm weights      stream the weights through the ring: wait for an empty stage,
//   =============================             copy 8 rows of a chunk into it, which marks it full
//   load what is added to the sums, then x      |
//   multiply full stages, mark them empty       |
template <TokenClass kClass, bool kNorm>
__global__ void __launch_bounds__(kBlockThreads, 2) linear_few_kernel(const __grid_constant__ FewArgs a) {
  constexpr bool kTwoHalves = kClass == TokenClass::kUpTo16;
  extern __shared__ __align__(128) uint8_t shared[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + a.layout.barriers);
  const Ring ring{barriers, barriers + kMaxStages, a.layout.num_stages};
  uint64_t* x_barrier = barriers + 2 * kMaxStages;
  const Share share(a.n);
  ptx::grid_dependents_launch();
  const bool copies = threadIdx.x >= kThreads;
  if (!copies)
    clear_padding(a, shared);
  else if (threadIdx.x == kThreads)
    init_barriers(a, ring, x_barrier);
  __syncwarp();
  // Copies overlap the cleared bytes only if the last chunk is shorter than the others; otherwise the copying
  // warp does not wait for the clearing.
  if (copies && a.layout.last_chunk == a.layout.chunk)
    ptx::named_barrier_arrive(kClearedBarrier, kBlockThreads);
  else
    ptx::named_barrier(kClearedBarrier, kBlockThreads);
  if (copies) return copy_weights(a, shared, share, ring);

  prefetch_bias(a, share);
  const int rows = min(kGroupRows, share.end - share.begin);
  if constexpr (kNorm) {
    const NormWeights weights(a);
    ptx::grid_dependency_wait();
    const Addend addend = addend_of(a, share.begin, rows, static_cast<int>(threadIdx.x));
    load_normed(a, weights, shared);
    multiply<kTwoHalves, kNorm>(a, shared, share, addend, ring);
  } else {
    ptx::grid_dependency_wait();
    const Addend addend = addend_of(a, share.begin, rows, static_cast<int>(threadIdx.x));
    load_x(a, shared, x_barrier);
    multiply<kTwoHalves, kNorm>(a, shared, share, addend, ring);
  }
}

TokenClass class_of(int64_t num_tokens) {
  if (num_tokens <= kFewLoneTokens) return TokenClass::kLone;
  return num_tokens <= 8 ? TokenClass::kUpTo8 : TokenClass::kUpTo16;
}

// Blocks per SM, and the shared memory of each block, which a ring may exceed only to have kGoodStages
// stages.
struct SmemBudget {
  int num_blocks, shared_bytes;
};

// Returns the number of stages that fit into `bytes`; negative: x does not fit.
int stages_within(int64_t num_tokens, int64_t k, int bytes) {
  const FewLayout layout = few_layout(static_cast<int>(num_tokens), static_cast<int>(k), 0);
  return (bytes - layout.end) / layout.stage_bytes;
}

// For TokenClass::kLone, a block's weights should be loaded before its tokens are ready, while other kernels'
// blocks run on the same SM. With the norm, the budget leaves room for a block of attention, the next kernel.
// Without the norm, two blocks share an SM: if a block of attention takes the room of one, the other can
// still load its weights.
SmemBudget smem_budget(int64_t num_tokens, int64_t k, bool norm) {
  constexpr int kKiB = 1024;
  if (class_of(num_tokens) != TokenClass::kLone) return {1, 150 * kKiB};
  if (norm) return {1, 169 * kKiB};
  constexpr SmemBudget kTwo{2, 111 * kKiB};
  return stages_within(num_tokens, k, kTwo.shared_bytes) >= kGoodStages ? kTwo : SmemBudget{1, 200 * kKiB};
}

// Returns the number of stages in the ring, no more than `wanted` needs; less than kMinStages: the ring does
// not fit.
int num_stages(int64_t num_tokens, int64_t k, bool norm, int64_t wanted) {
  const int most = stages_within(num_tokens, k, device_limits().shared_bytes_per_block);
  const int good = stages_within(num_tokens, k, smem_budget(num_tokens, k, norm).shared_bytes);
  const int stages = std::min(std::min(most, std::max(good, kGoodStages)), kMaxStages);
  return static_cast<int>(std::min<int64_t>(stages, std::max<int64_t>(wanted, kMinStages)));
}

using FewKernel = void (*)(FewArgs);

FewKernel kernel_of(TokenClass tokens, bool norm) {
  if (norm) return linear_few_kernel<TokenClass::kLone, true>;
  switch (tokens) {
    case TokenClass::kLone:
      return linear_few_kernel<TokenClass::kLone, false>;
    case TokenClass::kUpTo8:
      return linear_few_kernel<TokenClass::kUpTo8, false>;
    default:
      return linear_few_kernel<TokenClass::kUpTo16, false>;
  }
}

void launch_few(FewArgs a, bool norm) {
  const int blocks = std::min(a.n, device_limits().num_sms * smem_budget(a.num_tokens, a.k, norm).num_blocks);
  if (blocks == 0 || a.num_tokens == 0) return;
  const int64_t stages = ceil_div(ceil_div(a.n, blocks), kStageRows) * ceil_div(a.k, chunk_of(a.k));
  const int ring = num_stages(a.num_tokens, a.k, norm, stages);
  FP4MOE_CHECK(ring >= kMinStages, "linear_few with T=" + std::to_string(a.num_tokens) +
                                       " K=" + std::to_string(a.k) + " does not fit in shared memory");
  a.layout = few_layout(a.num_tokens, a.k, ring);
  const TokenClass tokens = class_of(a.num_tokens);
  const FewKernel kernel = kernel_of(tokens, norm);
  prepare_kernel(kernel, {.shared_bytes = device_limits().shared_bytes_per_block,
                          .shares_sm = tokens == TokenClass::kLone});
  launch("linear_few", kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), static_cast<size_t>(a.layout.end)}, a);
}

FewArgs few_args(const LinearArgs& l) {
  return {.weight = static_cast<const bf16*>(l.weight),
          .bias = l.bias,
          .x = static_cast<const bf16*>(l.x.data),
          .residual = nullptr,
          .norm_weight = nullptr,
          .out = l.out,
          .eps = 0,
          .num_tokens = static_cast<int>(l.x.rows),
          .n = static_cast<int>(l.n),
          .k = static_cast<int>(l.x.cols),
          .layout = {},
          .accumulate = l.accumulate};
}

}  // namespace

bool linear_few_fits(int64_t num_tokens, int64_t k) {
  return num_tokens <= kMaxTokens && k > 0 && k % 32 == 0 && k <= (1 << 17) &&
         num_stages(num_tokens, k, /*norm=*/false, kMinStages) >= kMinStages;
}

void linear_few(const LinearArgs& args) { launch_few(few_args(args), /*norm=*/false); }

void norm_linear_few(const NormLinearArgs& args) {
  FP4MOE_CHECK(args.linear.x.rows <= kFewLoneTokens, "too many tokens for norm_linear_few");
  FewArgs a = few_args(args.linear);
  a.x = nullptr;
  a.residual = args.norm.x;
  a.norm_weight = args.norm.weight;
  a.eps = args.norm.eps;
  launch_few(a, /*norm=*/true);
}

}  // namespace fp4moe
