// Dense linear layers for few tokens, optionally with the RMS norm of the input inside.
//
// Computes:  out [T, N] f32 (+)= x [T, K] W^T + bias, W [N, K] bf16 or FP8, row-major; x is bf16, or
//            norm(residual). Layers with FP8 and with bf16 weights on the same normed rows share a launch.
// Shapes:    T <= 16 (with the norm <= 4), K a multiple of 32, any N; all of x in shared memory.
// Bytes:     2 N K (FP8: N K), once from HBM; plus T (2 K + 4 N).
// Flops:     2 T N K, on mma.sync with the weights as its 16 rows and the tokens as its 8 columns.
// Bound:     HBM. Each block streams its share of the rows through a ring of bulk copies, and starts before
//            it waits for the kernel whose output it reads. A bulk copy costs the SM 44 ns whatever its size
//            (512 B: 1.5 TB/s in all, 1 KiB: 3.1 TB/s), so a copy is up to 3 KB of a row. Until x is there,
//            only kEarlyBytes are on their way at once.
// Numerics:  exact products, f32 sums: two chains over a warp's k's (32 of every 256 of a chunk), the sum of
//            both, then the 8 warps in order, then bias, then out's old value. A token has the same bits for
//            every T. With the norm inside, x = bf16(residual * weight), and 1 / rms multiplies the sum. FP8
//            codes (kernels/fp8_word.h) are exact in bf16. With one scale per row, it multiplies the row's
//            sum. With several, each 32 k's of a warp are summed from zero, and fma(scale, sum, total) adds
//            them to the total.
#include "kernels/cuda/dense/linear_few.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/dense/linear_few_block.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe {
namespace {

using namespace few_linear;

enum class TokenClass { kLone, kUpTo8, kUpTo16 };  // kLone: T <= kFewLoneTokens

// Returns for how many threads per block an SM's registers must suffice, with two blocks: more than there are
// leave room for the kernels before and after. A block has three warps on one quarter of an SM (16384
// registers). Without the norm, up to 64 registers: two blocks and two warps of the router or one of the
// gated delta net. With the norm, up to 80: one block and a warp of attention.
constexpr int room_for_threads(TokenClass tokens, bool norm, FewWeights weights) {
  if (weights == FewWeights::kFp8Blocks || tokens == TokenClass::kUpTo16) return kBlockThreads;
  return norm ? 384 : 512;
}

template <TokenClass kClass, bool kNorm, FewWeights kWeights>
__global__ void __launch_bounds__(room_for_threads(kClass, kNorm, kWeights), 2)
    linear_few_kernel(const __grid_constant__ FewArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Share share(a.n, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  run_block<kClass == TokenClass::kUpTo16, kNorm, kWeights>(a, share, shared);
}

// Two layers on the same normed rows: the first blocks have the rows of weights of any format, the others
// those of bf16 weights.
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
  return few_layout(a.num_tokens, a.k, shape.elem_bytes, ring, kEarlyBytes / smem_budget(shape).num_blocks);
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
  const bool is_fp8 = first.fp8.scales != nullptr;
  const int64_t first_bytes = int64_t{first.n} * (is_fp8 ? 1 : 2), second_bytes = int64_t{2} * second.n;
  const int second_blocks =
      std::min(second.n, static_cast<int>(ceil_div(second_bytes * sms, first_bytes + second_bytes)));
  p.first_blocks = std::min(first.n, sms - second_blocks);
  p.first.layout = layout_for(first, shape_of(first, /*norm=*/true), p.first_blocks);
  p.second.layout = layout_for(second, shape_of(second, /*norm=*/true), second_blocks);
  const auto kernel = !is_fp8                          ? norm_pair_kernel<FewWeights::kBf16>
                      : first.fp8.col_block >= first.k ? norm_pair_kernel<FewWeights::kFp8Rows>
                                                       : norm_pair_kernel<FewWeights::kFp8Blocks>;
  prepare_kernel(kernel, {.shared_bytes = device_limits().shared_bytes_per_block, .shares_sm = true});
  launch("linear_few_pair", kernel,
         {dim3(static_cast<unsigned>(p.first_blocks + second_blocks)), dim3(kBlockThreads),
          static_cast<size_t>(std::max(p.first.layout.end, p.second.layout.end))},
         p);
}

FewArgs few_args(const LinearArgs& l) {
  const bool is_fp8 = l.format == LinearFormat::kFp8;
  FP4MOE_CHECK(l.send == nullptr || !l.accumulate, "partial sums that are added to out");
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
          l.send != nullptr ? l.send->peers : PartialPeers(),
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

void linear_few(const LinearArgs& args) {
  launch_few(few_args(args), /*norm=*/false);
  if (args.send != nullptr) args.send->are_sent = true;
}

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
  if (second.fp8.scales == nullptr && first.n >= sms && second.n <= first.n)
    return launch_pair(first, second);
  launch_few(first, /*norm=*/true);
  launch_few(second, /*norm=*/true);
}

}  // namespace fp4moe
