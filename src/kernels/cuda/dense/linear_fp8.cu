// Dense linear layers with FP8 weights, for more tokens than linear_few.cu takes and for any number.
//
// Computes:  out [T, N] f32 (+)= x [T, K] W^T + bias; x bf16, W [N, K] e4m3 (kernels/fp8_word.h) with f32
// scales. Shapes:    any T and N; K a multiple of 16. A unit is 128 rows of W x up to 128 tokens. If there
// are fewer
//            units than SMs, a cluster of up to kMaxSplits blocks shares a unit and splits K; otherwise, each
//            block takes several units.
// Bytes:     N K once from HBM, from L2 again for each further 128 tokens; x once per unit from L2;
//            plus 4 T N (8 T N with accumulate).
// Flops:     2 T N K, with T padded to 16, 32, 64 or a multiple of 128.
// Bound:     HBM up to about 128 tokens, then the tensor cores and the conversion of the codes: about 16
//            instructions per thread for every 64 x 16 codes.
// Numerics:  codes are exact in bf16; f32 sums in ascending k, one chain per output and split; the splits'
//            sums are added in order. One scale per row: fma(scale, sum, bias), then out's old value.
//            Several: the columns of a scale, at most kDepth at a time, are summed from zero, and fma(scale,
//            sum, total) adds them to the total. kOneForAll does not split K: a token's bits are the same for
//            every T and N.
//
// A block has two warpgroups that multiply, each with 64 rows of W as wgmma's register operand, and a thread
// that fills the stages with tensor copies. It fetches weights before the kernel whose output is x has
// finished, and those of the next unit while this one's outputs are written.
#include "kernels/cuda/dense/linear_fp8.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>

#include "base/check.h"
#include "kernels/cuda/ptx/bf16_pair.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/ring_place.cuh"
#include "kernels/cuda/ptx/tensor_map.h"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace fp4moe {
namespace fp8_linear {
namespace {

constexpr int kGroups = 2, kRows = 64 * kGroups;  // warpgroups that multiply; rows of W per block
constexpr int kDepth = 128;                       // k's per stage
constexpr int kMultipliers = kGroups * 128, kThreads = kMultipliers + 32;
constexpr int kPartPitch = kRows + 4;  // floats of a token's sums; avoids bank conflicts
constexpr int kMaxSplits = 8;
constexpr int kMultiplyBarrier = 1;  // named barrier of the warps that multiply
static_assert(kDepth == kTensorTileBytes && kDepth * sizeof(bf16) == 2 * kTensorTileBytes);

struct Args {
  CUtensorMap codes, x;  // tiles of kRows x kDepth codes, and of the block's tokens x kDepth / 2
  Fp8LinearView weight;
  const float* bias;
  float* out;
  int num_tokens, n, k;
  int units, token_tiles, splits,
      split_steps;  // steps: of kDepth k's; split_steps: of each split but the last
  int segment;      // k's that are summed before they are multiplied by a scale
  bool accumulate;
};

template <int kTokens>
struct Shared {
  static constexpr int kSlabBytes = kTokens * 128;  // 64 k's of every token
  static constexpr int kCodeBytes = kRows * kDepth, kStageBytes = kCodeBytes + 2 * kSlabBytes;
  static constexpr int kStages = std::min(8, 200 * 1024 / kStageBytes);
  alignas(1024) uint8_t x[kStages][2 * kSlabBytes];
  alignas(1024) uint8_t codes[kStages][kCodeBytes];
  uint64_t full[kStages], empty[kStages];
};
static_assert(sizeof(Shared<16>::x) >= 16 * kPartPitch * sizeof(float));
static_assert(sizeof(Shared<128>::x) >= 128 * kPartPitch * sizeof(float));

// A block's part of a unit: the unit's rows and tokens, and the steps of the block's split.
template <int kTokens>
struct Work {
  int first_row, first_token, first_step, end_step;
  __device__ Work(const Args& a, int unit) {
    const int split = static_cast<int>(blockIdx.x) % a.splits;
    first_row = unit / a.token_tiles * kRows;
    first_token = unit % a.token_tiles * kTokens;
    first_step = split * a.split_steps;
    end_step = min(first_step + a.split_steps, (a.k + kDepth - 1) / kDepth);
  }
};

// Calls f(work) for each unit of the block's cluster. If K is split, a cluster has one unit.
template <int kTokens, class F>
__device__ __forceinline__ void for_each_unit(const Args& a, const F& f) {
  const int clusters = static_cast<int>(gridDim.x) / a.splits;
  for (int unit = static_cast<int>(blockIdx.x) / a.splits; unit < a.units; unit += clusters)
    f(Work<kTokens>(a, unit));
}

// Fills the stages; runs on one thread. The first stages' codes do not wait for the kernels before this one.
template <int kTokens>
__device__ void copy_stages(const Args& a, Shared<kTokens>& shared) {
  constexpr int kStages = Shared<kTokens>::kStages;
  const auto load_codes = [&](const Work<kTokens>& work, int step, int slot) {
    ptx::mbarrier_arrive_expect_tx(&shared.full[slot], Shared<kTokens>::kStageBytes);
    ptx::tensor_load(shared.codes[slot], &a.codes, step * kDepth, work.first_row, &shared.full[slot]);
  };
  const Work<kTokens> first(a, static_cast<int>(blockIdx.x) / a.splits);
  const int early = min(kStages, first.end_step - first.first_step);
  for (int i = 0; i < early; ++i) load_codes(first, first.first_step + i, i);
  ptx::grid_dependency_wait();
  RingPlace<kStages> place;
  int count = 0;  // of stages so far
  for_each_unit<kTokens>(a, [&](const Work<kTokens>& work) {
    for (int step = work.first_step; step < work.end_step; ++step, ++count, place.next()) {
      if (count >= kStages) ptx::mbarrier_wait(&shared.empty[place.slot], place.parity ^ 1);
      if (count >= early) load_codes(work, step, place.slot);
      for (int half = 0; half < 2; ++half)
        ptx::tensor_load(shared.x[place.slot] + half * Shared<kTokens>::kSlabBytes, &a.x,
                         step * kDepth + half * kDepth / 2, work.first_token, &shared.full[place.slot]);
    }
  });
}

// Steps of 16 k's in a group of wgmma: as many as the shortest segment has (kFp8ColumnStep), or half a stage.
template <bool kBlocks>
constexpr int kSteps = kBlocks ? 2 : 4;

// d += a * the tokens at descriptor x.
template <int kTokens, int kCount>
__device__ __forceinline__ void add(float (&d)[kTokens / 2], const uint32_t (&a)[kCount][4], uint64_t x) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kCount; ++s) Wgmma<kTokens>::add(d, a[s], wgmma_b_advance(x, 32 * s));
  wgmma_commit();
}

// The scales of a thread's rows g and g + 8. Rows past N have the last row's.
struct RowScales {
  const float* at[2];
  int col_block, last;

  __device__ RowScales(const Args& a, int row) {
    col_block = static_cast<int>(a.weight.col_block);
    const int blocks = (a.k + col_block - 1) / col_block;
    last = blocks - 1;
    for (int half = 0; half < 2; ++half)
      at[half] = a.weight.scales +
                 int64_t{min(row + 8 * half, a.n - 1) / static_cast<int>(a.weight.row_block)} * blocks;
  }
  // Adds to d the sums of a segment that begins at column k, times their scales, and clears the sums.
  template <int kCount>
  __device__ __forceinline__ void add_segment(int k, float (&sums)[kCount], float (&d)[kCount]) const {
    const int block = min(k / col_block, last);
    const float scale[2] = {__ldg(at[0] + block), __ldg(at[1] + block)};
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] = fmaf(scale[i % 4 / 2], sums[i], d[i]), sums[i] = 0;
  }
};

// Sets d to a warpgroup's sums over the block's part of K, in wgmma's order. kBlocks: several scales per row,
// which are applied here.
template <int kTokens, bool kBlocks>
__device__ __forceinline__ void multiply(const Args& a, const Work<kTokens>& work, Shared<kTokens>& shared,
                                         RingPlace<Shared<kTokens>::kStages>& place,
                                         float (&d)[kTokens / 2]) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  const uint32_t own = row * kDepth + row % 8 * 16 + lane % 4 * 4;  // in a stage: the row's word of piece 0
  const RowScales scales(a, work.first_row + row);
  float part[kBlocks ? kTokens / 2 : 1];
  constexpr int kGroupSteps = kSteps<kBlocks>, kGroupDepth = 16 * kGroupSteps;
  uint32_t w[2][kGroupSteps][4];
  int before = -1;
  const auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
  };
#pragma unroll
  for (float& sum : d) sum = 0;
#pragma unroll
  for (float& sum : part) sum = 0;
#pragma unroll 1
  for (int step = work.first_step; step < work.end_step; ++step, place.next()) {
    const int slot = __shfl_sync(~0u, place.slot, 0);  // lets the compiler know that slot is warp-uniform
    ptx::mbarrier_wait(&shared.full[slot], place.parity);
    const uint8_t* const codes = shared.codes[slot];
    const uint64_t x = wgmma_b_descriptor(ptx::shared_address(shared.x[slot]));
#pragma unroll
    for (int i = 0; i < kDepth / kGroupDepth; ++i) {
#pragma unroll
      for (int s = 0; s < kGroupSteps; ++s) {
        const uint8_t* at = codes + (own ^ ((i * kGroupSteps + s) * 16));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 pairs = fp8_word_to_bf16(*reinterpret_cast<const uint32_t*>(at + half * 8 * kDepth));
          w[i % 2][s][half] = pairs.x, w[i % 2][s][half + 2] = pairs.y;
        }
        keep_registers(w[i % 2][s]);  // ready before the fence; otherwise, wgmma would be serialised
      }
      const int first = i * kGroupDepth;  // k's before the group
      const uint64_t tokens = wgmma_b_advance(x, first / 64 * Shared<kTokens>::kSlabBytes + first % 64 * 2);
      if constexpr (kBlocks) {
        add<kTokens>(part, w[i % 2], tokens);
        const int done = first + kGroupDepth;
        if (done % a.segment == 0) {
          wgmma_wait<0>();
          keep_registers(part);
          scales.add_segment(step * kDepth + done - a.segment, part, d);
        } else {
          wgmma_wait<1>();
        }
      } else {
        add<kTokens>(d, w[i % 2], tokens);
        wgmma_wait<1>();
      }
      if (i == 0 && before >= 0) release(before);
    }
    before = slot;
  }
  wgmma_wait<0>();
  keep_registers(d);
  release(before);
}

// Scales a sum (unless kBlocks), adds the bias and writes the output.
template <bool kBlocks>
__device__ __forceinline__ void store(const Args& a, int token, int row, float sum) {
  if (token >= a.num_tokens || row >= a.n) return;
  const float bias = a.bias == nullptr ? 0 : __ldg(a.bias + row);
  const float scale = kBlocks ? 1 : __ldg(a.weight.scales + row / static_cast<int>(a.weight.row_block));
  float* out = a.out + int64_t{token} * a.n + row;
  const float value = fmaf(scale, sum, bias);
  *out = a.accumulate ? __fadd_rn(value, __ldcg(out)) : value;
}

// Calls f(token, row, sum) for each of a thread's sums; token and row are those of the unit.
template <int kTokens, class F>
__device__ __forceinline__ void for_each_sum(const float (&d)[kTokens / 2], const F& f) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4, token = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) f(8 * j + token + i % 2, row + i / 2 * 8, d[4 * j + i]);
}

// Adds the sums of the cluster's blocks, which each have put theirs in `parts` [kTokens][kPartPitch], in the
// blocks' order. Each block finishes some of the tokens.
template <int kTokens, bool kBlocks>
__device__ void add_splits(const Args& a, const Work<kTokens>& work, const float* parts) {
  const int rank = static_cast<int>(ptx::cluster_ctarank());
  const int first = kTokens * rank / a.splits, count = kTokens * (rank + 1) / a.splits - first;
  for (int i = static_cast<int>(threadIdx.x); i < count * kRows; i += kThreads) {
    const int token = first + i / kRows, row = i % kRows;
    const uint32_t at = ptx::shared_address(parts + token * kPartPitch + row);
    float sum = 0;
    for (int split = 0; split < a.splits; ++split) sum += ptx::ld_cluster(ptx::map_cluster(at, split));
    store<kBlocks>(a, work.first_token + token, work.first_row + row, sum);
  }
}

template <int kTokens, bool kBlocks>
__global__ void __launch_bounds__(kThreads, 1) linear_fp8_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<kTokens>*>(memory);
  ptx::grid_dependents_launch();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<kTokens>::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kMultipliers / 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  float* const parts = reinterpret_cast<float*>(shared.x);
  if (threadIdx.x >= kMultipliers) {
    if (threadIdx.x == kMultipliers) copy_stages(a, shared);
    __syncwarp();
  } else {
    RingPlace<Shared<kTokens>::kStages> place;
    for_each_unit<kTokens>(a, [&](const Work<kTokens>& work) {
      float d[kTokens / 2];
      multiply<kTokens, kBlocks>(a, work, shared, place, d);
      ptx::grid_dependency_wait();  // before out is written
      if (a.splits == 1) {
        for_each_sum<kTokens>(d, [&](int token, int row, float sum) {
          store<kBlocks>(a, work.first_token + token, work.first_row + row, sum);
        });
      } else {
        ptx::named_barrier(kMultiplyBarrier, kMultipliers);  // all stages have been read
        for_each_sum<kTokens>(d,
                              [&](int token, int row, float sum) { parts[token * kPartPitch + row] = sum; });
      }
    });
  }
  if (a.splits == 1) return;
  ptx::cluster_sync();
  add_splits<kTokens, kBlocks>(a, Work<kTokens>(a, static_cast<int>(blockIdx.x) / a.splits), parts);
  ptx::cluster_sync();  // no block may exit while its sums are read
}

// Returns the number of clusters of `splits` blocks that run at once.
template <int kTokens, bool kBlocks>
int max_clusters(int splits) {
  static std::atomic<int> known[kMaxSplits + 1];
  int count = known[splits].load();
  if (count > 0) return count;
  count = max_active_clusters(
      linear_fp8_kernel<kTokens, kBlocks>,
      {.block = kThreads, .shared_bytes = sizeof(Shared<kTokens>), .cluster = static_cast<unsigned>(splits)});
  known[splits].store(count);
  return count;
}

// Chooses the number of splits of K with which the last cluster is done first.
template <int kTokens, bool kBlocks>
void split_depth(Args& a, bool splits_k) {
  const int steps = static_cast<int>(ceil_div(a.k, kDepth));
  const int most = splits_k ? std::min(kMaxSplits, (steps + 1) / 2) : 1;
  int64_t least = 0;
  for (int splits = 1; splits <= most; ++splits) {
    const int64_t waves = ceil_div(a.units, max_clusters<kTokens, kBlocks>(splits));
    const int64_t time = waves * ceil_div(steps, splits);
    if (splits > 1 && (waves > 1 || time >= least)) continue;
    least = time;
    a.split_steps = static_cast<int>(ceil_div(steps, splits));
  }
  a.splits = static_cast<int>(ceil_div(steps, a.split_steps));
}

template <int kTokens, bool kBlocks>
void launch_kernel(Args a, bool splits_k) {
  const auto kernel = linear_fp8_kernel<kTokens, kBlocks>;
  prepare_kernel(kernel, {.shared_bytes = device_limits().shared_bytes_per_block});
  split_depth<kTokens, kBlocks>(a, splits_k);
  const int blocks = a.splits > 1 ? a.units * a.splits : std::min(a.units, device_limits().num_sms);
  launch("linear_fp8", kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), sizeof(Shared<kTokens>),
          static_cast<unsigned>(a.splits)},
         a);
}

template <int kTokens>
void launch_tokens(Args a, const bf16* x, bool splits_k) {
  a.x = tensor_map(x, sizeof(bf16), a.num_tokens, a.k, kTokens);
  a.token_tiles = static_cast<int>(ceil_div(a.num_tokens, kTokens));
  a.units = static_cast<int>(ceil_div(a.n, kRows)) * a.token_tiles;
  if (a.weight.col_block >= a.k)
    launch_kernel<kTokens, false>(a, splits_k);
  else
    launch_kernel<kTokens, true>(a, splits_k);
}

}  // namespace
}  // namespace fp8_linear

void linear_fp8(const LinearArgs& args, Fp8Splits splits) {
  using namespace fp8_linear;
  if (args.x.rows == 0 || args.n == 0) return;
  FP4MOE_CHECK(args.x.dtype == DType::kBF16 && args.x.cols % kFp8DeviceStep == 0,
               "linear_fp8 with K=" + std::to_string(args.x.cols));
  const Fp8LinearView& w = args.fp8;
  Args a{};
  a.codes = tensor_map(w.codes, 1, args.n, args.x.cols, kRows);
  a.weight = w;
  a.bias = args.bias;
  a.out = args.out;
  a.num_tokens = static_cast<int>(args.x.rows);
  a.n = static_cast<int>(args.n);
  a.k = static_cast<int>(args.x.cols);
  a.segment = static_cast<int>(std::gcd(w.col_block, int64_t{kDepth}));
  a.accumulate = args.accumulate;
  const auto* const x = static_cast<const bf16*>(args.x.data);
  const bool splits_k = splits == Fp8Splits::kBySize;
  if (a.num_tokens <= 16)
    launch_tokens<16>(a, x, splits_k);
  else if (a.num_tokens <= 32)
    launch_tokens<32>(a, x, splits_k);
  else if (a.num_tokens <= 64)
    launch_tokens<64>(a, x, splits_k);
  else
    launch_tokens<128>(a, x, splits_k);
}

}  // namespace fp4moe
