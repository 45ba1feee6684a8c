// A block of linear_few.cu: the warp that copies weights, and the warps that multiply. Device code only.
#pragma once

#include "kernels/cuda/comm/partial_sender.cuh"
#include "kernels/cuda/dense/linear_few_norm.cuh"
#include "kernels/cuda/dense/linear_few_weights.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe::few_linear {

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

// Paces the copies of weights until x is there (kEarlyBytes).
class EarlyCopies {
 public:
  __device__ EarlyCopies(const FewArgs& a, const uint8_t* shared)
      : is_loaded_(reinterpret_cast<const volatile int*>(shared + a.layout.loaded)),
        most_(a.layout.early_stages) {}

  // Waits until the copies into the ring's stage may be requested.
  __device__ void wait(const Ring& ring) {
    if (is_over_ || num_stages_++ < most_) return;
    const bool is_wrapped = ring.stage < most_;
    uint64_t* const full = &ring.full[is_wrapped ? ring.stage - most_ + ring.num_stages : ring.stage - most_];
    do {
      is_over_ = *is_loaded_ != 0;
    } while (!is_over_ && !ptx::mbarrier_test(full, is_wrapped ? ring.parity ^ 1 : ring.parity));
  }

 private:
  const volatile int* const is_loaded_;
  const int most_;
  int num_stages_ = 0;
  bool is_over_ = false;
};

template <FewWeights kWeights>
__device__ void copy_weights(const FewArgs& a, uint8_t* shared, const Share& share, Ring ring) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  EarlyCopies early(a, shared);
  for (int tile = share.begin; tile < share.end; tile += kTileRows) {
    const int halves = share.end - tile > kStageRows ? 2 : 1;
    for (int i = 0; i < a.layout.num_chunks * halves; ++i) {
      const int k = i / halves * a.layout.chunk, row = tile + i % halves * kStageRows;
      const int rows = min(kStageRows, share.end - row);
      constexpr int kElem = elem_bytes_of(kWeights);
      const uint32_t row_bytes = static_cast<uint32_t>(min(a.layout.chunk, a.k - k) * kElem);
      ptx::mbarrier_wait(&ring.empty[ring.stage], ring.parity ^ 1);
      early.wait(ring);
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
__device__ void write_outputs(const FewArgs& a, const uint8_t* shared, int first, int rows, Addend addend,
                              const cuda::PartialSender& sender) {
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
    const int64_t element = static_cast<int64_t>(t) * a.n + first + r;
    a.out[element] = sum + addend.before;
    if constexpr (!kNorm) sender.send(element, sum + addend.before);
  }
}

// Called once x is there, which ends the EarlyCopies.
template <bool kTwoHalves, bool kNorm, FewWeights kWeights>
__device__ void multiply(const FewArgs& a, uint8_t* shared, const Share& share, Addend addend, Ring ring,
                         const cuda::PartialSender& sender) {
  if (threadIdx.x == 0) *reinterpret_cast<volatile int*>(shared + a.layout.loaded) = 1;
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
    write_outputs<kNorm, kWeights>(a, shared, first, rows, addend, sender);
    ptx::named_barrier(kMultiplyBarrier, kThreads);
  }
}

__device__ void init_barriers(const FewArgs& a, const Ring& ring, uint64_t* x_barrier, uint8_t* shared) {
  for (int i = 0; i < a.layout.num_stages; ++i) {
    ptx::mbarrier_init(&ring.full[i], 1);
    ptx::mbarrier_init(&ring.empty[i], kWarps);
  }
  ptx::mbarrier_init(x_barrier, 1);
  ptx::mbarrier_init_fence();
  *reinterpret_cast<volatile int*>(shared + a.layout.loaded) = 0;
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
    init_barriers(a, ring, x_barrier, shared);
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
    const cuda::PartialSender sender(a.peers);
    load_normed(a, weights, shared);
    multiply<kTwoHalves, kNorm, kWeights>(a, shared, share, addend, ring, sender);
  } else {
    ptx::grid_dependency_wait();
    const Addend addend = addend_of<kWeights>(a, share.begin, rows, static_cast<int>(threadIdx.x));
    const cuda::PartialSender sender(a.peers);
    load_x(a, shared, x_barrier);
    multiply<kTwoHalves, kNorm, kWeights>(a, shared, share, addend, ring, sender);
  }
}

}  // namespace fp4moe::few_linear
