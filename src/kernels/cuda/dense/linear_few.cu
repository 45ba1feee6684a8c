// Dense linear layers for few tokens, optionally with the RMS norm of the input inside.
//
// Computes:  out [T, N] f32 (+)= x [T, K] W^T + bias, W [N, K] bf16 or FP8, row-major; x is bf16, or
//            norm(residual). Layers with FP8 and with bf16 weights on the same normed rows share a launch.
// Shapes:    T <= 16 (with the norm <= 4), K a multiple of 32, any N; all of x in shared memory.
// Bytes:     2 N K (FP8: N K), once from HBM; plus T (2 K + 4 N).
// Flops:     2 T N K, on mma.sync with the weights as its 16 rows and the tokens as its 8 columns.
// Bound:     HBM. Each block streams its share of the rows through a ring of bulk copies, and starts before
//            it waits for the kernel whose output it reads. A bulk copy costs the SM 44 ns whatever its size
//            (512 B: 1.5 TB/s in all, 1 KiB: 3.1 TB/s), so a copy is up to 3 KB of a row.
// Numerics:  exact products, f32 sums: two chains over a warp's k's (32 of every 256 of a chunk), the sum of
//            both, then the 8 warps in order, then bias, then out's old value. A token has the same bits for
//            every T. With the norm inside, x = bf16(residual * weight), and 1 / rms multiplies the sum. FP8
//            codes (kernels/fp8_word.h) are exact in bf16. With one scale per row, it multiplies the row's
//            sum. With several, each 32 k's of a warp are summed from zero, and fma(scale, sum, total) adds
//            them to the total.
#include "kernels/cuda/dense/linear_few.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/dense/linear_few_norm.cuh"
#include "kernels/cuda/dense/linear_few_weights.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe {
namespace {

using namespace few_linear;

enum class TokenClass { kLone, kUpTo8, kUpTo16 };  // kLone: T <= kFewLoneTokens

// A block's share of n rows; `blocks` blocks share them.
struct Share {
  int begin, end;
  __device__ Share(int n, int block, int blocks) {
    const int rows = n / blocks, rest = n % blocks;
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

template <FewWeights kWeights>
__device__ void copy_weights(const FewArgs& a, uint8_t* shared, const Share& share, Ring ring) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int tile = share.begin; tile < share.end; tile += kTileRows) {
    const int halves = share.end - tile > kStageRows ? 2 : 1;
    for (int i = 0; i < a.layout.num_chunks * halves; ++i) {
      const int k = i / halves * a.layout.chunk, row = tile + i % halves * kStageRows;
      const int rows = min(kStageRows, share.end - row);
      constexpr int kElem = elem_bytes_of(kWeights);
      const uint32_t row_bytes = static_cast<uint32_t>(min(a.layout.chunk, a.k - k) * kElem);
      ptx::mbarrier_wait(&ring.empty[ring.stage], ring.parity ^ 1);
      if (lane == 0)
        ptx::mbarrier_arrive_expect_tx(&ring.full[ring.stage], static_cast<uint32_t>(rows) * row_bytes);
      __syncwarp();
      if (lane < rows)
        ptx::bulk_load_once(shared + ring.stage * a.layout.stage_bytes + lane * a.layout.stage_pitch,
                            a.weight + (static_cast<int64_t>(row + lane) * a.k + k) * kElem, row_bytes,
                            &ring.full[ring.stage]);
      ring.advance();
    }
  }
}

// Clears the bytes after the last chunk in every stage, which longer chunks may overwrite, and the bytes
// after every row of x, so that the products of the padding are zeros.
template <FewWeights kWeights>
__device__ void clear_padding(const FewArgs& a, uint8_t* shared) {
  const auto clear = [&](uint8_t* rows, int num_rows, int pitch, int from, int to) {
    const int words = (to - from) / 4;
    for (int i = static_cast<int>(threadIdx.x); i < num_rows * words; i += kThreads)
      *reinterpret_cast<uint32_t*>(rows + i / words * pitch + from + i % words * 4) = 0;
  };
  if (a.layout.padded_k == a.k) return;
  constexpr int kElem = elem_bytes_of(kWeights);
  clear(shared, a.layout.num_stages * kStageRows, a.layout.stage_pitch, a.layout.last_chunk * kElem,
        a.layout.padded_chunk * kElem);
  clear(shared + a.layout.x, a.num_tokens, a.layout.x_pitch, a.k * 2, a.layout.padded_k * 2);
  ptx::fence_proxy_async();
}

__device__ void prefetch_bias(const FewArgs& a, const Share& share) {
  constexpr int kLine = 128 / sizeof(float);
  if (a.bias == nullptr) return;
  for (int i = share.begin + static_cast<int>(threadIdx.x) * kLine; i < share.end; i += kThreads * kLine)
    ptx::prefetch_l2(a.bias + i);
}

// Addresses of a lane's operands in one step: weights of rows g and g + 8, and x of tokens g and g + 8.
// Tokens past the last read an existing token; their columns are ignored.
struct Operands {
  const uint8_t *low, *high, *x, *x_high;
};

// Adds to c [half of the tokens][chain] a step's products of two stages' rows and the tokens.
template <bool kTwoHalves, FewWeights kWeights>
__device__ __forceinline__ void multiply_step(const uint4& low, const uint4& high, const uint8_t* x,
                                              const uint8_t* x_high, float (&c)[2][2][4]) {
  const uint4 v = load_x_of_eight<kWeights>(x);
  ptx::mma_bf16(c[0][0], {low.x, high.x, low.y, high.y}, v.x, v.y);
  ptx::mma_bf16(c[0][1], {low.z, high.z, low.w, high.w}, v.z, v.w);
  if (!kTwoHalves) return;
  const uint4 y = load_x_of_eight<kWeights>(x_high);
  ptx::mma_bf16(c[1][0], {low.x, high.x, low.y, high.y}, y.x, y.y);
  ptx::mma_bf16(c[1][1], {low.z, high.z, low.w, high.w}, y.z, y.w);
}

// Adds to c two stages' rows times the tokens, over this warp's k's: 32 of every kStepK. Without kHasHigh,
// there are only the first stage's rows.
template <bool kTwoHalves, bool kHasHigh, FewWeights kWeights>
__device__ __forceinline__ void multiply_chunk(Operands o, int num_pairs, const LaneScales& scales,
                                               float (&c)[2][2][4]) {
  constexpr int kElem = elem_bytes_of(kWeights);
#pragma unroll(kElem == 1 ? 4 : 3)
  for (int pair = 0; pair < num_pairs; ++pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 low = load_eight<kWeights>(o.low + i * kStepK * kElem);
      uint4 high{};
      if constexpr (kHasHigh) high = load_eight<kWeights>(o.high + i * kStepK * kElem);
      const uint8_t *x = o.x + i * kStepK * 2, *x_high = o.x_high + i * kStepK * 2;
      if constexpr (kWeights != FewWeights::kFp8Blocks) {
        multiply_step<kTwoHalves, kWeights>(low, high, x, x_high, c);
      } else {
        const int block = scales.block_at(pair * kPairK + i * kStepK);
        const float by[2] = {__ldg(scales.low + block), __ldg(scales.high + block)};
        float part[2][2][4] = {};
        multiply_step<kTwoHalves, kWeights>(low, high, x, x_high, part);
#pragma unroll
        for (int half = 0; half < (kTwoHalves ? 2 : 1); ++half)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            c[half][0][j] = fmaf(by[j / 2], part[half][0][j] + part[half][1][j], c[half][0][j]);
      }
    }
    o.low += kPairK * kElem, o.high += kPairK * kElem, o.x += kPairK * 2, o.x_high += kPairK * 2;
  }
}

// A row's scale (kFp8Rows) and the values added to a sum. They are loaded before the sum is ready: at the end
// of the kernel, each load would cost as much as 2 MB of weights.
struct Addend {
  float scale = 1, bias = 0, before = 0;  // before: out's old value
};

template <FewWeights kWeights>
__device__ Addend addend_of(const FewArgs& a, int first, int rows, int i) {
  Addend addend;
  if (i >= a.num_tokens * rows) return addend;
  const int row = first + i % rows;
  if (kWeights == FewWeights::kFp8Rows)
    addend.scale = __ldg(a.fp8.scales + row / static_cast<int>(a.fp8.row_block));
  if (a.bias != nullptr) addend.bias = __ldg(a.bias + row);
  if (a.accumulate) addend.before = __ldcg(a.out + static_cast<int64_t>(i / rows) * a.n + row);
  return addend;
}

// Adds the warps' sums for a group in warp order, and writes the outputs. `addend` belongs to this thread's
// first output.
template <bool kNorm, FewWeights kWeights>
__device__ void write_outputs(const FewArgs& a, const uint8_t* shared, int first, int rows, Addend addend) {
  const float* sums = reinterpret_cast<const float*>(shared + a.layout.sums);
  for (int i = static_cast<int>(threadIdx.x); i < a.num_tokens * rows; i += kThreads) {
    if (i >= kThreads) addend = addend_of<kWeights>(a, first, rows, i);
    const int t = i / rows, r = i % rows;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      sum += sums[(warp * a.num_tokens + t) * a.layout.group_rows + r];
    if (kNorm) sum *= inverse_rms(a, shared, t);
    sum = kWeights == FewWeights::kFp8Rows ? fmaf(addend.scale, sum, addend.bias) : sum + addend.bias;
    a.out[static_cast<int64_t>(t) * a.n + first + r] = sum + addend.before;
  }
}

// Puts a warp's sums for a tile into `sums` [T][group_rows], beginning at row `row` of the group.
template <bool kTwoHalves>
__device__ __forceinline__ void keep_sums(const FewArgs& a, const float (&c)[2][2][4], int row, float* sums) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, q = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < (kTwoHalves ? 2 : 1); ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int t = half * 8 + q * 2 + i % 2; t < a.num_tokens)
        sums[t * a.layout.group_rows + row + g + i / 2 * kStageRows] = c[half][0][i] + c[half][1][i];
}

template <bool kTwoHalves, bool kNorm, FewWeights kWeights>
__device__ void multiply(const FewArgs& a, uint8_t* shared, const Share& share, Addend addend, Ring ring) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, at = warp * 32 + lane % 4 * 8, x_at = warp * 32 + first_column<kWeights>(lane % 4);
  const uint8_t *x = shared + a.layout.x + min(g, a.num_tokens - 1) * a.layout.x_pitch + x_at * 2,
                *x_high = shared + a.layout.x + min(g + 8, a.num_tokens - 1) * a.layout.x_pitch + x_at * 2;
  const uint8_t* weights = shared + g * a.layout.stage_pitch + at * elem_bytes_of(kWeights);
  float* sums = reinterpret_cast<float*>(shared + a.layout.sums) + warp * a.num_tokens * a.layout.group_rows;
  const int num_pairs = a.layout.padded_chunk / kPairK;
  for (int first = share.begin; first < share.end; first += a.layout.group_rows) {
    const int rows = min(a.layout.group_rows, share.end - first);
    if (first != share.begin) addend = addend_of<kWeights>(a, first, rows, static_cast<int>(threadIdx.x));
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
        LaneScales scales{};
        if constexpr (kWeights == FewWeights::kFp8Blocks)
          scales = lane_scales(a.fp8, a.k, k + warp * 32, min(first + row + g, share.end - 1),
                               min(first + row + g + kStageRows, share.end - 1));
        const Operands operands{weights + low.stage * a.layout.stage_bytes,
                                weights + ring.stage * a.layout.stage_bytes, x + k * 2, x_high + k * 2};
        if (has_high)
          multiply_chunk<kTwoHalves, true, kWeights>(operands, num_pairs, scales, c);
        else
          multiply_chunk<kTwoHalves, false, kWeights>(operands, num_pairs, scales, c);
        __syncwarp();
        if (lane == 0) {
          ptx::mbarrier_arrive(&ring.empty[low.stage]);
          if (has_high) ptx::mbarrier_arrive(&ring.empty[ring.stage]);
        }
        ring.advance();
      }
      keep_sums<kTwoHalves>(a, c, row, sums);
    }
    ptx::named_barrier(kMultiplyBarrier, kThreads);
    write_outputs<kNorm, kWeights>(a, shared, first, rows, addend);
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

// Returns for how many threads per block an SM's registers must suffice, with two blocks: more than there are
// leave room for the kernels before and after. A block has three warps on one quarter of an SM (16384
// registers). Without the norm, up to 64 registers: two blocks and two warps of the router or one of the
// gated delta net. With the norm, up to 80: one block and a warp of attention.
constexpr int room_for_threads(TokenClass tokens, bool norm, FewWeights weights) {
  if (weights == FewWeights::kFp8Blocks || tokens == TokenClass::kUpTo16) return kBlockThreads;
  return norm ? 384 : 512;
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
template <bool kTwoHalves, bool kNorm, FewWeights kWeights>
__device__ __forceinline__ void run_block(const FewArgs& a, const Share& share, uint8_t* shared) {
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + a.layout.barriers);
  const Ring ring{barriers, barriers + kMaxStages, a.layout.num_stages};
  uint64_t* x_barrier = barriers + 2 * kMaxStages;
  ptx::grid_dependents_launch();
  const bool copies = threadIdx.x >= kThreads;
  if (!copies)
    clear_padding<kWeights>(a, shared);
  else if (threadIdx.x == kThreads)
    init_barriers(a, ring, x_barrier);
  __syncwarp();
  // Copies overlap the cleared bytes only if the last chunk is shorter than the others; otherwise the copying
  // warp does not wait for the clearing.
  if (copies && a.layout.last_chunk == a.layout.chunk)
    ptx::named_barrier_arrive(kClearedBarrier, kBlockThreads);
  else
    ptx::named_barrier(kClearedBarrier, kBlockThreads);
  if (copies) return copy_weights<kWeights>(a, shared, share, ring);

  prefetch_bias(a, share);
  const int rows = min(a.layout.group_rows, share.end - share.begin);
  if constexpr (kNorm) {
    const NormWeights weights(a);
    ptx::grid_dependency_wait();
    const Addend addend = addend_of<kWeights>(a, share.begin, rows, static_cast<int>(threadIdx.x));
    load_normed(a, weights, shared);
    multiply<kTwoHalves, kNorm, kWeights>(a, shared, share, addend, ring);
  } else {
    ptx::grid_dependency_wait();
    const Addend addend = addend_of<kWeights>(a, share.begin, rows, static_cast<int>(threadIdx.x));
    load_x(a, shared, x_barrier);
    multiply<kTwoHalves, kNorm, kWeights>(a, shared, share, addend, ring);
  }
}

template <TokenClass kClass, bool kNorm, FewWeights kWeights>
__global__ void __launch_bounds__(room_for_threads(kClass, kNorm, kWeights), 2)
    linear_few_kernel(const __grid_constant__ FewArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Share share(a.n, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  run_block<kClass == TokenClass::kUpTo16, kNorm, kWeights>(a, share, shared);
}

// Two layers on the same normed rows: the first blocks have the rows of FP8 weights, the others those of bf16
// weights.
struct PairArgs {
  FewArgs first, second;
  int first_blocks;
};

template <FewWeights kFirst>
__global__ void __launch_bounds__(kBlockThreads, 1) norm_pair_kernel(const __grid_constant__ PairArgs p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  if (block < p.first_blocks)
    run_block<false, true, kFirst>(p.first, Share(p.first.n, block, p.first_blocks), shared);
  else
    run_block<false, true, FewWeights::kBf16>(
        p.second, Share(p.second.n, block - p.first_blocks, blocks - p.first_blocks), shared);
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

// What determines a launch's layout.
struct FewShape {
  int num_tokens, k, elem_bytes;
  bool norm;
};

// Returns the number of stages that fit into `bytes`; negative: x does not fit.
int stages_within(const FewShape& s, int bytes) {
  const FewLayout layout = few_layout(s.num_tokens, s.k, s.elem_bytes, 0);
  return (bytes - layout.end) / layout.stage_bytes;
}

// For TokenClass::kLone, a block's weights should be loaded before its tokens are ready, while other kernels'
// blocks run on the same SM. With the norm, the budget leaves room for a block of attention or of the gated
// delta net, the next kernel. Without the norm, two blocks share an SM: if a block of attention takes the
// room of one, the other can still load its weights.
SmemBudget smem_budget(const FewShape& s) {
  constexpr int kKiB = 1024;
  if (class_of(s.num_tokens) != TokenClass::kLone) return {1, 150 * kKiB};
  if (s.norm) return {1, 169 * kKiB};
  constexpr SmemBudget kTwo{2, 111 * kKiB};
  return stages_within(s, kTwo.shared_bytes) >= kGoodStages ? kTwo : SmemBudget{1, 200 * kKiB};
}

// Returns the number of stages in the ring, no more than `wanted` needs; less than kMinStages: the ring does
// not fit.
int num_stages(const FewShape& s, int64_t wanted) {
  const int most = stages_within(s, device_limits().shared_bytes_per_block);
  const int good = stages_within(s, smem_budget(s).shared_bytes);
  const int stages = std::min(std::min(most, std::max(good, kGoodStages)), kMaxStages);
  return static_cast<int>(std::min<int64_t>(stages, std::max<int64_t>(wanted, kMinStages)));
}

using FewKernel = void (*)(FewArgs);

template <FewWeights kWeights>
FewKernel kernel_of(TokenClass tokens, bool norm) {
  if (norm) return linear_few_kernel<TokenClass::kLone, true, kWeights>;
  switch (tokens) {
    case TokenClass::kLone:
      return linear_few_kernel<TokenClass::kLone, false, kWeights>;
    case TokenClass::kUpTo8:
      return linear_few_kernel<TokenClass::kUpTo8, false, kWeights>;
    default:
      return linear_few_kernel<TokenClass::kUpTo16, false, kWeights>;
  }
}

FewKernel kernel_of(const FewArgs& a, bool norm) {
  const TokenClass tokens = class_of(a.num_tokens);
  if (a.fp8.scales == nullptr) return kernel_of<FewWeights::kBf16>(tokens, norm);
  return a.fp8.col_block >= a.k ? kernel_of<FewWeights::kFp8Rows>(tokens, norm)
                                : kernel_of<FewWeights::kFp8Blocks>(tokens, norm);
}

FewShape shape_of(const FewArgs& a, bool norm) {
  return {a.num_tokens, a.k, a.fp8.scales == nullptr ? 2 : 1, norm};
}

// Returns the layout for `blocks` blocks.
FewLayout layout_for(const FewArgs& a, const FewShape& shape, int blocks) {
  const int64_t stages =
      ceil_div(ceil_div(a.n, blocks), kStageRows) * ceil_div(a.k, chunk_of(a.k, shape.elem_bytes));
  const int ring = num_stages(shape, stages);
  FP4MOE_CHECK(ring >= kMinStages, "linear_few with T=" + std::to_string(a.num_tokens) +
                                       " K=" + std::to_string(a.k) + " does not fit in shared memory");
  return few_layout(a.num_tokens, a.k, shape.elem_bytes, ring);
}

void launch_few(FewArgs a, bool norm) {
  const FewShape shape = shape_of(a, norm);
  const int blocks = std::min(a.n, device_limits().num_sms * smem_budget(shape).num_blocks);
  if (blocks == 0 || a.num_tokens == 0) return;
  a.layout = layout_for(a, shape, blocks);
  const FewKernel kernel = kernel_of(a, norm);
  prepare_kernel(kernel, {.shared_bytes = device_limits().shared_bytes_per_block,
                          .shares_sm = class_of(a.num_tokens) == TokenClass::kLone});
  launch("linear_few", kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), static_cast<size_t>(a.layout.end)}, a);
}

// One block per SM. The blocks are divided by the bytes of the layers' weights.
void launch_pair(const FewArgs& first, const FewArgs& second) {
  if (first.num_tokens == 0) return;
  PairArgs p{first, second, 0};
  const int sms = device_limits().num_sms;
  const int second_blocks =
      std::min(second.n, static_cast<int>(ceil_div(int64_t{2} * second.n * sms, first.n + 2 * second.n)));
  p.first_blocks = std::min(first.n, sms - second_blocks);
  p.first.layout = layout_for(first, shape_of(first, /*norm=*/true), p.first_blocks);
  p.second.layout = layout_for(second, shape_of(second, /*norm=*/true), second_blocks);
  const auto kernel = first.fp8.col_block >= first.k ? norm_pair_kernel<FewWeights::kFp8Rows>
                                                     : norm_pair_kernel<FewWeights::kFp8Blocks>;
  prepare_kernel(kernel, {.shared_bytes = device_limits().shared_bytes_per_block, .shares_sm = true});
  launch("linear_few_pair", kernel,
         {dim3(static_cast<unsigned>(p.first_blocks + second_blocks)), dim3(kBlockThreads),
          static_cast<size_t>(std::max(p.first.layout.end, p.second.layout.end))},
         p);
}

FewArgs few_args(const LinearArgs& l) {
  const bool is_fp8 = l.format == LinearFormat::kFp8;
  return {{.bias = l.bias,
           .x = static_cast<const bf16*>(l.x.data),
           .residual = nullptr,
           .norm_weight = nullptr,
           .out = l.out,
           .eps = 0,
           .num_tokens = static_cast<int>(l.x.rows),
           .n = static_cast<int>(l.n),
           .k = static_cast<int>(l.x.cols)},
          is_fp8 ? l.fp8.codes : static_cast<const uint8_t*>(l.weight),
          is_fp8 ? l.fp8 : Fp8LinearView(),
          {},
          l.accumulate};
}

}  // namespace

bool linear_few_fits(const LinearArgs& args) {
  const int64_t k = args.x.cols;
  if (args.x.rows > kMaxTokens || k <= 0 || k % 32 != 0 || k > (1 << 17)) return false;
  const FewShape shape{static_cast<int>(args.x.rows), static_cast<int>(k),
                       args.format == LinearFormat::kFp8 ? 1 : 2, /*norm=*/false};
  return num_stages(shape, kMinStages) >= kMinStages;
}

void linear_few(const LinearArgs& args) { launch_few(few_args(args), /*norm=*/false); }

void norm_linear_few(const NormLinearArgs& args) {
  FP4MOE_CHECK(args.linear.x.rows <= kFewLoneTokens, "too many tokens for norm_linear_few");
  const auto normed = [&](const LinearArgs& linear) {
    FewArgs a = few_args(linear);
    a.x = nullptr;
    a.residual = args.norm.x;
    a.norm_weight = args.norm.weight;
    a.eps = args.norm.eps;
    return a;
  };
  const FewArgs first = normed(args.linear);
  if (args.also.n == 0) return launch_few(first, /*norm=*/true);
  const FewArgs second = normed(args.also);
  const int sms = device_limits().num_sms;
  if (first.fp8.scales != nullptr && second.fp8.scales == nullptr && first.n >= sms && second.n <= first.n)
    return launch_pair(first, second);
  launch_few(first, /*norm=*/true);
  launch_few(second, /*norm=*/true);
}

}  // namespace fp4moe
