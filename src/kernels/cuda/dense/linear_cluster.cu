// Dense linear layers for the batches of decode: clusters of blocks share tokens and weights.
//
// Computes:  out [T, N] f32 (+)= x [T, K] W^T + bias; x and W [N, K] bf16 row-major.
// Shapes:    T <= 128; K a multiple of 8, N of 4. A block computes the outputs of up to 64 tokens and 16 to
//            112 rows of W, or 32 to 80 if T > 64; all blocks run at once, which limits N.
// Bytes:     2 N K from HBM; x from L2 once per cluster; plus 4 T N (8 T N with accumulate).
// Flops:     2 T N K, with T padded to 64 or 128.
// Bound:     HBM, or what an SM receives: 2 K (rows + tokens) bytes at 64 bytes per clock. K is not split
//            among blocks: each has as few rows as give every SM a share.
// Numerics:  f32 sums; two chains over K, each over every other stage of k's in ascending order, are added;
//            then bias + out's old value. A token has the same bits for every T <= 64, and for every T > 64.
//
// A block has two warpgroups, which take turns at the stages of k's: one would spend most of its time on the
// latencies of waiting, starting products and passing stages on. wgmma's rows are the tokens, its columns the
// rows of W. Two more threads fill rings of stages with W and x. The blocks of a cluster with the same tokens
// fill the stages of x in turn, each for all of them, and so do those with the same rows of W. Rows of W are
// copied before the kernel whose output is x has finished.
#include "kernels/cuda/dense/linear_cluster.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/tensor_map.h"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace fp4moe {
namespace {

constexpr int kCluster = 4;
constexpr int kBlockTokens = 64, kMostTokens = 2 * kBlockTokens;
constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kMultipliers = kGroups * 128, kThreads = kMultipliers + 64;
constexpr int kBoxDepth = 64;  // k's of a tensor copy
constexpr int kRowBytes = kBoxDepth * sizeof(bf16);
constexpr int kXBox = kBlockTokens * kRowBytes;
constexpr int kRingBytes = 208 << 10;
constexpr KernelAttributes kAttributes = {.shared_bytes = kRingBytes + 2048, .shares_sm = true};
constexpr int kEarlyBytes = 52 << 10;  // of weights that a block requests at once, at first
constexpr int kMultiplyBarrier = 1;    // named barrier of the warps that multiply
static_assert(kRowBytes == kTensorTileBytes);

struct Args {
  CUtensorMap x, weight;  // boxes of a block's tokens, and of its rows
  const float* bias;
  float* out;
  int num_tokens, n, k;
  int part_tokens;  // of a block: a multiple of 8
  int early;        // stages of weights on their way at once, at first
  bool accumulate;
};

// The barriers of a ring of stages that kSharers blocks of a cluster fill in turn, each for all of them. A
// stage belongs to one warpgroup, so that a parity cannot be mistaken for that of the use before.
template <int kStages, int kSharers>
struct SharedRing {
  static_assert(kStages % kSharers == 0 && kStages % kGroups == 0);
  uint64_t full[kStages], empty[kStages];

  // num_bytes: of a stage.
  __device__ void init(uint32_t num_bytes) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&full[i], 1);
      ptx::mbarrier_init(&empty[i], kSharers * 4);
      ptx::mbarrier_arrive_expect_tx(&full[i], num_bytes);
    }
  }
  static __device__ __forceinline__ int slot(int step) { return step % kStages; }
  // Which of the sharers fills the step's stage.
  static __device__ __forceinline__ int filler(int step) { return slot(step) % kSharers; }
  __device__ __forceinline__ void wait_empty(int step) {
    if (step >= kStages) ptx::mbarrier_wait(&empty[slot(step)], step / kStages % 2 ^ 1);
  }
  __device__ __forceinline__ void wait_full(int step) {
    ptx::mbarrier_wait(&full[slot(step)], step / kStages % 2);
  }
  // Prepares a full stage for its next use: by one thread, before its warp's release.
  __device__ __forceinline__ void expect_next(int step, uint32_t num_bytes) {
    ptx::mbarrier_arrive_expect_tx(&full[slot(step)], num_bytes);
  }
  // Passes the stage on, if it will be filled again, to block `rank` of the cluster: by a thread of each
  // warp. That block waits for the arrivals, so none is on its way when blocks exit.
  __device__ __forceinline__ void release(int step, int steps, int rank) {
    if (step + kStages < steps) ptx::mbarrier_arrive_cluster(&empty[slot(step)], rank);
  }
};

// Blocks of a cluster: kTokenParts parts of the tokens times kCluster / kTokenParts parts of rows.
template <int kTokenParts, int kRows>
struct Block {
  static constexpr int kRowParts = kCluster / kTokenParts;
  static constexpr int kBoxes = kRows > 64 ? 1 : 2, kDepth = kBoxes * kBoxDepth;  // k's of a stage
  static constexpr int kWeightBox = kRows * kRowBytes;
  // Few rows need many tokens on their way, many rows need room for weights.
  static constexpr int kXBoxes = kTokenParts == 2 ? (kRows > 64 ? 10 : 12) : kRows > 40 ? 8 : 16;
  static constexpr int kXStages = kXBoxes / kBoxes;
  static constexpr int kWeightStages =
      std::min(16, (kRingBytes - kXBoxes * kXBox) / (kBoxes * kWeightBox) / 2 * 2);
  static constexpr int kPitch = kRows + (kRows % 16 == 0 ? 8 : 0);  // of a token's sums; no bank conflicts

  struct Shared {
    union {
      struct {
        alignas(1024) uint8_t x[kXStages][kBoxes][kXBox];
        alignas(1024) uint8_t weights[kWeightStages][kBoxes][kWeightBox];
      };
      float sums[kGroups][kBlockTokens][kPitch];  // once all stages have been read
    };
    SharedRing<kXStages, kRowParts> x_ring;
    SharedRing<kWeightStages, kTokenParts> weight_ring;
  };
  static_assert(sizeof(Shared) <= kAttributes.shared_bytes);

  const Args& a;
  Shared& shared;
  const int token_part, row_part, steps, first_row, first_token;

  __device__ __forceinline__ Block(const Args& args, Shared& memory)
      : a(args),
        shared(memory),
        token_part(static_cast<int>(ptx::cluster_ctarank()) % kTokenParts),
        row_part(static_cast<int>(ptx::cluster_ctarank()) / kTokenParts),
        steps((args.k + kDepth - 1) / kDepth),
        first_row((static_cast<int>(blockIdx.x) / kCluster * kRowParts + row_part) * kRows),
        first_token(token_part * args.part_tokens) {}

  __device__ uint32_t x_bytes() const { return kBoxes * a.part_tokens * kRowBytes; }
  static constexpr uint32_t kWeightBytes = kBoxes * kWeightBox;

  __device__ void init_barriers() const {
    shared.x_ring.init(x_bytes());
    shared.weight_ring.init(kWeightBytes);
    ptx::mbarrier_init_fence();
  }

  // Until the ring is full, only a.early stages are on their way at once: the loads of the kernels before
  // this one, which are still running, would wait behind more.
  __device__ void copy_weights() const {
    constexpr uint16_t kSharers = (1 << kTokenParts) - 1;
    for (int step = 0; step < steps; ++step) {
      if (shared.weight_ring.filler(step) != token_part) continue;
      shared.weight_ring.wait_empty(step);
      if (step >= a.early && step < kWeightStages) shared.weight_ring.wait_full(step - a.early);
      const int slot = shared.weight_ring.slot(step);
      for (int box = 0; box < kBoxes; ++box)
        ptx::tensor_load_multicast(shared.weights[slot][box], &a.weight, step * kDepth + box * kBoxDepth,
                                   first_row, &shared.weight_ring.full[slot],
                                   kSharers << row_part * kTokenParts);
    }
  }

  __device__ void copy_x() const {
    constexpr uint16_t kSharers = kTokenParts == 1 ? 0b1111 : 0b0101;
    ptx::grid_dependency_wait();
    for (int step = 0; step < steps; ++step) {
      if (shared.x_ring.filler(step) != row_part) continue;
      shared.x_ring.wait_empty(step);
      const int slot = shared.x_ring.slot(step);
      for (int box = 0; box < kBoxes; ++box)
        ptx::tensor_load_multicast(shared.x[slot][box], &a.x, step * kDepth + box * kBoxDepth, first_token,
                                   &shared.x_ring.full[slot], kSharers << token_part);
    }
  }

  // Sets d to a warpgroup's sums over its stages, in wgmma's order.
  __device__ __forceinline__ void multiply(float (&d)[kRows / 2]) const {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (float& sum : d) sum = 0;
#pragma unroll 1
    for (int step = __shfl_sync(~0u, thread / 128, 0); step < steps; step += kGroups) {
      shared.weight_ring.wait_full(step);
      shared.x_ring.wait_full(step);
      wgmma_fence();
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const uint64_t x = wgmma_b_descriptor(ptx::shared_address(shared.x[shared.x_ring.slot(step)][box]));
        const uint64_t weights =
            wgmma_b_descriptor(ptx::shared_address(shared.weights[shared.weight_ring.slot(step)][box]));
#pragma unroll
        for (int i = 0; i < kBoxDepth / 16; ++i)
          Wgmma<kRows>::add(d, wgmma_b_advance(x, 32 * i), wgmma_b_advance(weights, 32 * i));
      }
      wgmma_commit();
      if (thread % 128 == 0) {
        shared.x_ring.expect_next(step, x_bytes());
        shared.weight_ring.expect_next(step, kWeightBytes);
      }
      wgmma_wait<0>();
      if (thread % 32 == 0) {
        shared.x_ring.release(step, steps, shared.x_ring.filler(step) * kTokenParts + token_part);
        shared.weight_ring.release(step, steps, row_part * kTokenParts + shared.weight_ring.filler(step));
      }
      __syncwarp();
    }
    keep_registers(d);
  }

  // Puts a warpgroup's sums into `sums`.
  static __device__ __forceinline__ void keep_sums(const float (&d)[kRows / 2],
                                                   float (&sums)[kBlockTokens][kPitch]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int token = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 2)
      *reinterpret_cast<float2*>(&sums[token + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2]) = {d[i], d[i + 1]};
  }

  // Calls f(token, row, index) for each of a thread's groups of four outputs, which begin at row `row` of the
  // block. index: 0, 1, ...
  static constexpr int kQuads = kRows / 4,
                       kThreadQuads = (kBlockTokens * kQuads + kMultipliers - 1) / kMultipliers;
  template <class F>
  __device__ __forceinline__ void for_each_quad(const F& f) const {
#pragma unroll
    for (int index = 0; index < kThreadQuads; ++index) {
      const int i = index * kMultipliers + static_cast<int>(threadIdx.x);
      const int token = i / kQuads, row = i % kQuads * 4;
      if (token < a.part_tokens && first_token + token < a.num_tokens && first_row + row < a.n)
        f(token, row, index);
    }
  }
  __device__ __forceinline__ float4* out_at(int token, int row) const {
    return reinterpret_cast<float4*>(a.out + int64_t{first_token + token} * a.n + first_row + row);
  }

  __device__ __forceinline__ void compute() const {
    float4 addends[kThreadQuads];  // loaded early: their latency would count at the end
    for_each_quad([&](int token, int row, int index) {
      float4 v = {0, 0, 0, 0};
      if (a.bias != nullptr) v = __ldg(reinterpret_cast<const float4*>(a.bias + first_row + row));
      if (a.accumulate) v = add(v, __ldcg(out_at(token, row)));
      addends[index] = v;
    });
    {
      float d[kRows / 2];
      multiply(d);
      ptx::named_barrier(kMultiplyBarrier, kMultipliers);
      ptx::cluster_arrive_relaxed();
      keep_sums(d, shared.sums[threadIdx.x / 128]);
    }
    ptx::named_barrier(kMultiplyBarrier, kMultipliers);
    for_each_quad([&](int token, int row, int index) {
      const float4 first = *reinterpret_cast<const float4*>(&shared.sums[0][token][row]),
                   second = *reinterpret_cast<const float4*>(&shared.sums[1][token][row]);
      *out_at(token, row) = add(add(first, second), addends[index]);
    });
  }

  static __device__ __forceinline__ float4 add(const float4& a, const float4& b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  }
};

template <int kTokenParts, int kRows>
__global__ void __launch_bounds__(kThreads, 1) linear_cluster_kernel(const __grid_constant__ Args a) {
  using B = Block<kTokenParts, kRows>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const B block(a, *reinterpret_cast<typename B::Shared*>(memory));
  ptx::grid_dependents_launch();
  if (threadIdx.x == kMultipliers) block.init_barriers();
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // all blocks' barriers are ready
  if (threadIdx.x < kMultipliers) {
    ptx::grid_dependency_wait();
    block.compute();
  } else {
    if (threadIdx.x == kMultipliers) block.copy_weights();
    if (threadIdx.x == kMultipliers + 32) block.copy_x();
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
  ptx::cluster_wait();  // no block may exit while its copies into others are on their way
}

// Returns the number of blocks that run at once.
int max_blocks() {
  static const int count = [] {
    const auto kernel = linear_cluster_kernel<1, 16>;
    prepare_kernel(kernel, kAttributes);
    return kCluster * max_active_clusters(kernel, {.block = kThreads,
                                                   .shared_bytes = sizeof(Block<1, 16>::Shared),
                                                   .cluster = kCluster});
  }();
  return count;
}

// Rows of a block per part of the tokens. With two parts, only the first kNumPartRows<2> are used.
constexpr std::array kPartRows = {16, 24, 32, 40, 48, 64, 80, 112};
template <int kTokenParts>
constexpr size_t kNumPartRows = kTokenParts == 1 ? kPartRows.size() : 4;
// With the fewest rows per block, tokens are most of what an SM receives: then, a product with split K is
// faster if K is larger (H200: 1536 x 7168 takes 12.6 us, with cuBLASLt 10.3; 2048 x 4096 takes 7.8, with
// cuBLASLt 9.0).
constexpr int64_t kMostDepthOfFewRows = 4096;

template <int kTokenParts, int kRows>
void launch_kernel(Args a, const LinearArgs& args) {
  using B = Block<kTokenParts, kRows>;
  const auto kernel = linear_cluster_kernel<kTokenParts, kRows>;
  prepare_kernel(kernel, kAttributes);
  a.x = tensor_map(args.x.data, sizeof(bf16), args.x.rows, args.x.cols, a.part_tokens);
  a.weight = tensor_map(args.weight, sizeof(bf16), args.n, args.x.cols, kRows);
  a.early = std::max(kEarlyBytes / static_cast<int>(B::kWeightBytes * kTokenParts), 1) * kTokenParts;
  const int64_t clusters = ceil_div(args.n, kRows * B::kRowParts);
  launch("linear_cluster", kernel,
         {dim3(static_cast<unsigned>(clusters * kCluster)), dim3(kThreads), sizeof(typename B::Shared),
          kCluster},
         a);
}

template <int kTokenParts>
void launch_tokens(Args a, const LinearArgs& args) {
  a.part_tokens = static_cast<int>(ceil_div(args.x.rows, 8 * kTokenParts) * 8);
  const auto launch_if = [&]<int kRows>(std::integral_constant<int, kRows>) {
    if (args.n > int64_t{kRows} * max_blocks()) return false;
    launch_kernel<kTokenParts, kTokenParts * kRows>(a, args);
    return true;
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (void)(launch_if(std::integral_constant<int, kPartRows[i]>()) || ...);
  }
  (std::make_index_sequence<kNumPartRows<kTokenParts>>());
}

}  // namespace

bool linear_cluster_fits(const LinearArgs& args) {
  // Where ranks share a GPU, blocks that wait for this rank could leave no GPC with room for a cluster.
  if (ranks_per_gpu() > 1) return false;
  const int64_t n = args.n, k = args.x.cols;
  if (args.x.rows > kMostTokens || k <= 0 || k % 8 != 0 || n % 4 != 0 || !is_aligned_to_16(args.x.data) ||
      !is_aligned_to_16(args.weight) || !is_aligned_to_16(args.out) || !is_aligned_to_16(args.bias))
    return false;
  const size_t choices = args.x.rows > kBlockTokens ? kNumPartRows<2> : kNumPartRows<1>;
  const int64_t blocks = max_blocks();
  return n <= kPartRows[choices - 1] * blocks && (k <= kMostDepthOfFewRows || n > kPartRows.front() * blocks);
}

void linear_cluster(const LinearArgs& args) {
  if (args.x.rows == 0 || args.n == 0) return;
  Args a{};
  a.bias = args.bias;
  a.out = args.out;
  a.num_tokens = static_cast<int>(args.x.rows);
  a.n = static_cast<int>(args.n);
  a.k = static_cast<int>(args.x.cols);
  a.accumulate = args.accumulate;
  if (a.num_tokens <= kBlockTokens)
    launch_tokens<1>(a, args);
  else
    launch_tokens<2>(a, args);
}

}  // namespace fp4moe
