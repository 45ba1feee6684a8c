// Runs the whole MoE layer after the router for few tokens: one persistent kernel, one CTA per SM.
//
// Computes  out[t] (+)= sum over k of weight[t, k] * (act(x W13_e^T + b13_e) W2_e^T + b2_e), e = ids[t, k];
//           a shared expert (SharedSlot) is the last of a token's experts; a bf16 one:
//           few_tokens_dense.cuh. In a direct round: few_tokens_lanes.cuh.
// Shapes    as in DeviceMoeArgs; T <= 8, T * topk (with a shared expert, T * (topk + 1)) <= 64. Plan:
//           kernels/cuda/experts/few_tokens_plan.h.
// Bytes     the tiles of U active experts once: (gated ? 3 : 2) H I / 2 bytes of codes each, and their
//           scales.
// Flops     2 * 8 per weight on the tensor cores (8 columns); about 2.2 instructions per weight to decode it.
// Bound     HBM; at T = 1 the latency of two dependent reads. The stream of weights does not pause between
//           the phases: each warp's ring fills with `down` while h is in flight.
// Numerics  products of bf16 pairs in f32 (mma.sync). x and h are multiplied by 2^64, so |x| and |h| must be
//           below 2^60. If an expert has one or two tokens, the scales multiply the f32 sums of blocks;
//           otherwise they multiply the weights, which is exact in bf16. A row's sum is split over warps
//           depending on the number of active experts, and its pieces are added in column order. Activation
//           in f32, h rounded to bf16; the router's weights are applied in f32 in top-k order. The same input
//           and number of SMs give the same bits.
//           w4a8: x and h are e4m3 codes with one scale per row, and weights are e4m3 operands; both are
//           exact in f16, and products and sums are f32. Every CTA quantises the rows that it reads.
//
// Synchronisation: CTAs exchange h and y as 64-bit words whose upper half marks the lower half as valid, so a
// value needs one trip through the L2 but no grid barrier. Each CTA's helper warp first clears its share of
// the words, then waits until all CTAs have cleared theirs; no warp stores h or y before that
// (Shared::cleared). The wait has normally ended by the time the first sums are ready.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "base/check.h"
#include "device/stream.h"
#include "kernels/cuda/experts/few_tokens.h"
#include "kernels/cuda/experts/few_tokens_consume.cuh"
#include "kernels/cuda/experts/few_tokens_dense.cuh"
#include "kernels/cuda/experts/few_tokens_fp8.cuh"
#include "kernels/cuda/experts/few_tokens_lanes.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe {
namespace {

using few::Args, few::Part, few::Ring, few::Shared;

// Adds the pieces that later warps computed for a strip whose first step belongs to this warp.
__device__ inline void add_pieces(const Shared& s, const Part& part, int strip_end, float (&sum)[4]) {
  const int lane = threadIdx.x % 32;
  for (int w = threadIdx.x / 32 + 1; w < few::kWarps && part.start(w) < strip_end; ++w) {
    if (part.start(w) == part.start(w + 1)) continue;
    const float4 piece = s.pieces[w][lane];
    sum[0] += piece.x, sum[1] += piece.y, sum[2] += piece.z, sum[3] += piece.w;
  }
}

template <class W>
__device__ inline void finish_strip(const Args& a, const few::Strip<W>& strip, bool down,
                                    const float (&sum)[4]) {
  if (down)
    finish_down(a, strip, sum);
  else
    finish_up(a, strip, sum);
}

// Runs the warp's steps of a phase. The warp that has a strip's first step finishes the strip; warps with
// later steps leave their sums in s.pieces. Example: 3 strips of 6 steps, cut evenly over 4 warps:
//
//   strip   0            1            2
//   step    0 1 2 3 4 5  0 1 2 3 4 5  0 1 2 3 4 5
//   warp    0 0 0 0 1 1  1 1 1 2 2 2  2 3 3 3 3 3
//
//   warp 0                 multiplies strip 0       barrier  adds piece 1, finishes strip 0
//   warp 1  leaves piece 1 multiplies strip 1       barrier  adds piece 2, finishes strip 1
//   warp 2  leaves piece 2 multiplies strip 2       barrier  adds piece 3, finishes strip 2
//   warp 3  leaves piece 3                          barrier
//
// A warp with several strips finishes each one before its last immediately. Every warp passes the barrier
// exactly once: before it finishes a strip that later warps continue, which is always its last strip, or when
// it has no steps left. The helper warp has no steps.
template <class W, int kDepth>
__device__ inline void run_phase(const Args& a, Shared& s, const uint8_t* act, bool down, bool is_helper,
                                 Ring<W, kDepth>& ring) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Part part(a, s.num_experts, down, warp);
  const int per_strip = part.phase.steps();
  const int end = is_helper ? part.begin : part.end;
  bool must_pass = true;  // this warp has not passed the barrier yet
  for (int at = part.begin;;) {
    const bool is_done = at >= end;
    const int strip_at = at / part.phase.by_steps, strip_begin = strip_at * per_strip,
              first = at - strip_begin, steps = min(per_strip - first, end - at);
    if (is_done && !must_pass) break;
    few::Strip<W> strip;
    float sum[4] = {};
    if (!is_done) {
      strip = few::Strip<W>(a, s, part, down, part.first_strip + strip_at, act);
      add_steps(s, ring, strip, first, steps, sum);
      at += steps;
      if (first != 0) {
        s.pieces[warp][lane] = {sum[0], sum[1], sum[2], sum[3]};
        continue;
      }
    }
    if (steps < per_strip) {  // later warps continue the strip, or is_done: then steps is <= 0
      __syncthreads();
      must_pass = false;
      if (is_done) break;
      add_pieces(s, part, strip_begin + per_strip, sum);
    }
    ptx::mbarrier_wait(&s.cleared, 0);
    finish_strip(a, strip, down, sum);
  }
}

constexpr int shared_bytes(bool fp8, bool dense) {
  return few::shared_bytes(fp8) + (dense ? few_padded(sizeof(few::DenseShared)) : 0);
}

// Copies to shared memory the h that this CTA's part of `down` needs, and does meanwhile what the shared
// expert needs.
template <class W, bool kDense, class Input>
__device__ inline void exchange_h(const Args& a, Shared& s, const Input& input, uint8_t* act) {
  few::DenseShared& dense = few::dense_of(s);
  few::DenseDown dense_down;
  if constexpr (kDense) {
    dense_down.load(a);
    few::put_dense_h(a, s, dense);
  }
  few::weigh_shared(a, s);
  const Part down(a, s.num_experts, true, 0);
  if constexpr (W::kFp8)
    few::stage_fp8_h(a, s, input, down, act);
  else
    few::stage_h(a, s, input, down, act);
  if constexpr (kDense) few::stage_dense_h(a, s, dense);
  __syncthreads();
  if constexpr (kDense) dense_down.multiply(a, s, dense);
}

// Fetches the beginning of this CTA's piece of the weights that a linear layer reads next into the L2, if
// that is most of the piece: with less of it, steps did not become shorter. For one warp. linear_few's
// blocks, one per SM, read equal pieces.
__device__ inline void prefetch_next(const Args& a) {
  constexpr int kStep = 4096, kMostBytes = 128 << 10;
  if (a.moe.next.data == nullptr) return;
  const int64_t piece_bytes = a.moe.next.num_bytes / gridDim.x / 16 * 16;
  if (piece_bytes > kMostBytes * 8 / 5) return;
  const int num_bytes = static_cast<int>(min(piece_bytes, int64_t{kMostBytes}));
  const auto* const piece = static_cast<const uint8_t*>(a.moe.next.data) + blockIdx.x * piece_bytes;
  for (int at = static_cast<int>(threadIdx.x) % 32 * kStep; at + kStep <= num_bytes; at += 32 * kStep)
    ptx::bulk_prefetch_l2(piece + at, kStep);
}

// kDense: with a bf16 shared expert. With LaneArgs, only the helper warp waits for the kernels before, so
// that the other warps can read what other ranks have sent.
template <class W, int kDepth, bool kDense, class KernelArgs = Args>
__global__ void __launch_bounds__(few::kThreads, 1) few_tokens_kernel(const __grid_constant__ KernelArgs a) {
  constexpr bool kOnLanes = std::is_same_v<KernelArgs, few::LaneArgs>;
  using Input = std::conditional_t<kOnLanes, few::LaneInput, few::StoredInput>;
  using Sums = std::conditional_t<kOnLanes, few::ReturnedSums, few::StoredSums>;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  uint8_t* act = memory + shared_bytes(W::kFp8, kDense);
  uint8_t* rings = act + a.plan.act_bytes;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == few::kHelperWarp * 32) {
    ptx::mbarrier_init(&s.cleared, 1);
    ptx::mbarrier_init_fence();
  }
  few::DenseUp dense_up;
  if constexpr (kDense) dense_up.load(a);
  if constexpr (!kOnLanes) {
    ptx::grid_dependency_wait();
    note_reached(a.mark);
  }
  const bool is_helper = warp == few::kHelperWarp;
  const Input input(a);
  const auto stage_x = [&] {
    if constexpr (W::kFp8)
      few::stage_raw_x(a, input, few::fp8_of(s), act);
    else
      few::stage_x(a, input, act);
  };
  if (kOnLanes && !is_helper) stage_x();  // while the helper warp waits for the slots
  const few::Slots slots = input.slots(a, s, is_helper);
  if (!kOnLanes && !is_helper) stage_x();  // while the slots are being loaded
  const few::Routing routing(a, slots);
  Ring<W, kDepth> ring(a, routing, rings);
  if (is_helper) {
    few::find_rows(a.token_slots, routing, slots.weight, s);
    if constexpr (kDense) few::place_dense_rows(a, s);
  } else {
    ring.prefill();
    if constexpr (kDense) dense_up.multiply(a, few::dense_of(s));
    if constexpr (W::kFp8) few::quantise_x<W::kFormat>(a, few::fp8_of(s), act);
  }
  __syncthreads();
  few::Outputs outputs(a);
#pragma unroll 1
  for (int phase = 0; phase < 2; ++phase) {
    if (is_helper && phase == 0) {
      if constexpr (kOnLanes) {
        ptx::grid_dependency_wait();
        input.clear_last_lanes();
      }
      few::clear_words(a, s, few::dense_row(s, kDense ? static_cast<int>(a.moe.num_tokens) : 0));
    }
    if (is_helper && phase != 0) prefetch_next(a);
    run_phase(a, s, act, phase != 0, is_helper, ring);
    if (phase != 0) break;
    ptx::grid_dependents_launch();  // if triggered at the start, a model's step would take 2.5 % longer
    exchange_h<W, kDense>(a, s, input, act);
  }
  // The helper has passed run_phase()'s barrier, so all CTAs have read the lanes.
  if constexpr (kOnLanes) note_reached(a.mark);
  few::combine<Sums>(a, s, input, outputs);
}

// ---- host ----------------------------------------------------------------------------------------

using Kernel = void (*)(Args);
constexpr int kDepths[] = {kFewMaxDepth, 2};  // of the rings; cp.async's group count is a compile-time
                                              // constant
template <Fp4Format kFormat, bool kFp8>
constexpr Kernel kKernels[] = {few_tokens_kernel<few::Weights<kFormat, kFp8>, kFewMaxDepth, false>,
                               few_tokens_kernel<few::Weights<kFormat, kFp8>, 2, false>};
// The only instance with a bf16 shared expert.
constexpr Fp4Format kDenseFormat = Fp4Format::kNvfp4;
constexpr Kernel kDenseKernel = few_tokens_kernel<few::Weights<kDenseFormat, false>, kFewMaxDepth, true>;
const Kernel* kernels_of(Fp4Format format, FewWeights weights) {
  constexpr Fp4Format kMx = Fp4Format::kMxfp4, kNv = Fp4Format::kNvfp4;
  if (weights == FewWeights::kFp8) return format == kMx ? kKernels<kMx, true> : kKernels<kNv, true>;
  return format == kMx ? kKernels<kMx, false> : kKernels<kNv, false>;
}

using LaneKernel = void (*)(few::LaneArgs);
template <Fp4Format kFormat, bool kFp8>
constexpr LaneKernel kLaneKernel =
    few_tokens_kernel<few::Weights<kFormat, kFp8>, kFewMaxDepth, false, few::LaneArgs>;
LaneKernel lane_kernel_of(Fp4Format format, FewWeights weights) {
  constexpr Fp4Format kMx = Fp4Format::kMxfp4, kNv = Fp4Format::kNvfp4;
  if (weights == FewWeights::kFp8) return format == kMx ? kLaneKernel<kMx, true> : kLaneKernel<kNv, true>;
  return format == kMx ? kLaneKernel<kMx, false> : kLaneKernel<kNv, false>;
}

int token_slots(const DeviceMoeArgs& args) {
  return static_cast<int>(args.topk) + (args.shared.exists ? 1 : 0);
}

bool has_dense_shared(const DeviceMoeArgs& args) { return args.shared.gate_up != nullptr; }

int fixed_bytes(const DeviceMoeArgs& args, FewWeights weights) {
  return shared_bytes(weights == FewWeights::kFp8, has_dense_shared(args));
}

FewPlan plan_of(const DeviceMoeArgs& args, FewWeights weights) {
  const DeviceInfo& gpu = device_limits();
  return few_plan(args.experts, args.num_tokens, token_slots(args), gpu.num_sms,
                  gpu.shared_bytes_per_block - fixed_bytes(args, weights));
}

// Whether every CTA has a warp for each of its rows of a bf16 shared expert, and h a row of a.h.
bool dense_shared_fits(const DeviceMoeArgs& args, FewWeights weights) {
  const int64_t h = args.experts.hidden_size, i = args.shared.intermediate_size,
                ctas = device_limits().num_sms;
  const FewPlan plan = plan_of(args, weights);
  return weights == FewWeights::kBf16 && args.experts.format == kDenseFormat && plan.depth == kFewMaxDepth &&
         h % 8 == 0 && h <= few::kMaxDenseH && i % 8 == 0 && i <= few::kMaxDenseI &&
         2 * ceil_div(i / 2, ctas) <= few::kColumns && ceil_div(h, ctas) <= few::kWarps + 1 &&
         i / 2 <= plan.down.row_words();
}

int64_t h_bytes(const TiledExperts& e) {
  return kFewMaxPairs * ceil_div(e.intermediate_size, kFewStepTiles * kTileCols) * kFewRowStepBytes * 2;
}

few::Fp8Matrix fp8_matrix(Fp4Format format, int64_t n, int64_t k) {
  return {fp8_tiled_bytes(format, n, k), fp8_row_factors_offset(format, n, k)};
}

template <class KernelArgs>
void launch_few(void (*kernel)(KernelArgs), int shared_bytes, const KernelArgs& args) {
  prepare_kernel(kernel, {.shared_bytes = device_limits().shared_bytes_per_block});
  // The CTAs wait for each other.
  launch("few_tokens", kernel,
         {.grid = dim3(static_cast<unsigned>(args.plan.num_ctas)),
          .block = dim3(few::kThreads),
          .shared_bytes = static_cast<size_t>(shared_bytes),
          .is_cooperative = true},
         args);
}

}  // namespace

bool few_tokens_fits(const DeviceMoeArgs& args, FewWeights weights) {
  const int64_t pairs = args.num_tokens * token_slots(args);
  const DeviceInfo& gpu = device_limits();
  if (gpu.compute_major() != 9 || gpu.num_sms < kFewMaxPairs || args.num_tokens > kFewMaxTokens ||
      pairs > kFewMaxPairs || args.exchange != nullptr || args.added.exist())
    return false;
  // Direct rounds have kernels for the greatest depth only.
  if (args.direct != nullptr) return !args.shared.exists && plan_of(args, weights).depth >= kFewMaxDepth;
  if (has_dense_shared(args) && !dense_shared_fits(args, weights)) return false;
  return plan_of(args, weights).depth >= kDepths[std::size(kDepths) - 1];
}

int64_t few_tokens_workspace_bytes(const TiledExperts& experts, int64_t) {
  return h_bytes(experts) + kFewMaxPairs * experts.hidden_size * 8;
}

void few_tokens_layer(const DeviceMoeArgs& args, FewWeights weights) {
  if (args.num_tokens == 0) return;
  FP4MOE_CHECK(few_tokens_fits(args, weights), "too many tokens for one launch");
  FP4MOE_CHECK(args.send == nullptr || (args.out != nullptr && !args.accumulate),
               "partial sums that are not stored, or added to others");
  const TiledExperts& e = args.experts;
  const int64_t up_rows = (is_gated(e.activation.kind) ? 2 : 1) * e.intermediate_size;
  Args a;
  a.moe = args;
  a.plan = plan_of(args, weights);
  a.token_slots = token_slots(args);
  a.fp8_up = fp8_matrix(e.format, up_rows, e.hidden_size);
  a.fp8_down = fp8_matrix(e.format, e.hidden_size, e.intermediate_size);
  a.counters = reinterpret_cast<FewCounters*>(args.counters + kFewCountersOffset);
  a.h = reinterpret_cast<few::Word*>(args.workspace);
  a.y = reinterpret_cast<few::Word*>(args.workspace + h_bytes(args.experts));
  if (args.send != nullptr) a.peers = args.send->peers;
  size_t choice = 0;
  while (kDepths[choice] > a.plan.depth) ++choice;
  const int shared_bytes =
      fixed_bytes(args, weights) + a.plan.act_bytes + kFewWarps * kDepths[choice] * few_slot_bytes(e.format);
  if (args.direct != nullptr)
    return launch_few(lane_kernel_of(e.format, weights), shared_bytes, few::LaneArgs{a, *args.direct});
  launch_few(has_dense_shared(args) ? kDenseKernel : kernels_of(e.format, weights)[choice], shared_bytes, a);
  if (args.send != nullptr) args.send->are_sent = true;
}

}  // namespace fp4moe
