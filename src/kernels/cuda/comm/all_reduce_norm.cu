// All-reduce over the GPUs of a group, added to the residual, and the RMS norm of the residual.
//
// Computes:  out [T, H] += sum over ranks r, in order, of partial_r [T, H], f32, each rounded to bf16 first
//            if it is sent as bf16; y = out / sqrt(mean(out^2) + eps) * weight, as bf16 and/or f32.
//            partial_r can be the weighted sums of its experts' rows (MoeCombineArgs).
// Shapes:    H a multiple of 4, up to kMaxNormedCols; any T whose words fit in the heap.
// Bytes:     w T H to each of R - 1 peers, with w = 4 or 2; T H (4 + 4 + 4 + 2 and/or 4) of local memory.
// Flops:     (R + 4) T H.
// Bound:     the links for large T; for small T, the latency of a store, of a poll at the receiver and of a
//            block's sum.
// Numerics:  those of moe_combine.cu, all_reduce.cu and rms_norm.cu, with the same bits.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/summed_rows.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kMaxNormWarps = kMaxNormThreads / 32;
constexpr unsigned kMaxClusterBlocks = 8;
constexpr int kClusterThreads = 256;  // at most, of a block of a cluster

struct NormArgs {
  CommGroup group;
  CommOp op;
  PartialRows partials;
  float* out;
  const float* weight;
  bf16* act;   // or null
  float* f32;  // or null
  int64_t rows, cols;
  float eps;
  int threads;    // that norm a row, in all blocks of the cluster
  bool are_sent;  // the partials, by the kernel before
};

// The sum over all threads that norm a row, in the order of block_sum(). All threads of the cluster call it.
// `warps` is this block's copy of the sums of all warps. No block may write those of the next sum to it
// before all have ended this one, so callers alternate between two.
template <int kVectors>
__device__ __forceinline__ float cluster_sum(float sum, const RowThread<kVectors>& thread, float* warps) {
  sum = warp_sum(sum);
  if (thread.index % 32 == 0 && thread.index < thread.threads)
    for (uint32_t block = 0; block < ptx::cluster_nctas(); ++block)
      ptx::st_cluster(ptx::map_cluster(ptx::shared_address(warps + thread.index / 32), block), sum);
  ptx::cluster_sync();
  float total = 0;
  for (int i = 0; i < thread.threads / 32; ++i) total += warps[i];
  return total;
}

// Returns this rank's operand of a row; zeros after the last row.
template <int kVectors>
__device__ __forceinline__ RowPart<kVectors> own_row(const NormArgs& a, int64_t row,
                                                     const RowThread<kVectors>& thread) {
  return row < a.rows ? a.partials.row(row, thread) : RowPart<kVectors>{};
}

// Each block or cluster takes rows in turn. In a group that has failed, the blocks of a cluster go on,
// because they wait for each other, but they neither send nor wait for peers.
template <class Format, int kVectors, bool kIsCluster>
__device__ __forceinline__ void add_and_norm(const NormArgs& a) {
  using Words = typename Format::Words;
  using RowPart = RowPart<kVectors>;
  ptx::grid_dependents_launch();
  if constexpr (kIsCluster) ptx::cluster_arrive();  // this block's shared memory can be written
  const int block = kIsCluster ? static_cast<int>(ptx::cluster_ctarank()) : 0;
  const RowThread<kVectors> thread{block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x),
                                   a.threads, static_cast<int>(a.cols / 4)};
  RowPart weight{};
  thread.for_vectors(
      [&](int j, int i) { weight.v[j] = __ldg(reinterpret_cast<const float4*>(a.weight) + i); });
  const int64_t step = kIsCluster ? ptx::cluster_count() : gridDim.x,
                begin = kIsCluster ? ptx::cluster_id() : blockIdx.x;
  ptx::grid_dependency_wait();
  RowPart mine = own_row(a, begin, thread);  // loaded together with the epoch
  const Operation o(a.group, a.op);
  const int me = a.group.rank, size = o.failed ? 0 : a.group.size;
  const auto row_at = [&](int rank, int source, int64_t row) {
    return words_at<Words>(o, rank, source) + row * thread.vectors;
  };
  // Sends this rank's row, and rounds it as it is sent.
  const auto send = [&](int64_t row, RowPart& own) {
#pragma unroll 1
    for (int r = a.are_sent || row >= a.rows ? size : 0; r < size; ++r)
      if (r != me)
        thread.for_vectors([&](int j, int i) { store_words(row_at(r, me, row) + i, Format::of(own.v[j])); });
    for (float4& v : own.v) v = Format::values(Format::of(v));
  };
  send(begin, mine);
  if constexpr (kIsCluster) ptx::cluster_wait();
  for (int64_t row = begin, i = 0; row < a.rows; row += step, ++i) {
    RowPart next = own_row(a, row + step, thread);
    send(row + step, next);  // the links carry it during the sum
    const int64_t first = row * a.cols;
    RowPart residual = RowPart::load(a.out + first, thread), sum{};
#pragma unroll 1
    for (int r = 0; r < size; ++r) sum += r == me ? mine : take_row<Format>(o, r, row_at(me, r, row), thread);
    residual += sum;
    mine = next;
    float squares = 0;
    for (const float4& v : residual.v) squares = sum_of_squares(squares, v);
    if constexpr (kIsCluster) {
      __shared__ float warps[2][kMaxNormWarps];
      squares = cluster_sum(squares, thread, warps[i % 2]);
    } else {
      squares = block_sum(squares);
    }
    const float inverse = inverse_rms(squares, a.cols, a.eps);
    thread.for_vectors([&](int j, int v) {
      const float4 y = normed(residual.v[j], inverse, weight.v[j]);
      reinterpret_cast<float4*>(a.out + first)[v] = residual.v[j];
      if (a.f32 != nullptr) reinterpret_cast<float4*>(a.f32 + first)[v] = y;
      if (a.act != nullptr) reinterpret_cast<uint2*>(a.act + first)[v] = bf16_words(y);
    });
    if constexpr (!kIsCluster) __syncthreads();  // before the next row's block_sum()
  }
}

template <class Format, int kVectors>
__global__ void __launch_bounds__(kClusterThreads) cluster_norm_kernel(const __grid_constant__ NormArgs a) {
  add_and_norm<Format, kVectors, true>(a);
}
template <class Format>
__global__ void __launch_bounds__(kNarrowThreads, 2) narrow_norm_kernel(const __grid_constant__ NormArgs a) {
  add_and_norm<Format, 1, false>(a);
}
template <class Format>
__global__ void __launch_bounds__(kMaxNormThreads) norm_kernel(const __grid_constant__ NormArgs a) {
  add_and_norm<Format, kMaxVectors, false>(a);
}

using NormKernel = void (*)(NormArgs);
template <class Format>
NormKernel norm_kernel_of(int64_t cols, bool is_cluster) {
  if (is_cluster)
    return cols <= 4 * kMaxNormThreads ? cluster_norm_kernel<Format, 1>
                                       : cluster_norm_kernel<Format, kMaxVectors>;
  return cols <= 4 * kNarrowThreads ? narrow_norm_kernel<Format> : norm_kernel<Format>;
}

// Few rows are shared by several blocks each, which does not change the bits. Clusters need more room on a
// GPU than ranks that share it leave free.
unsigned cluster_blocks(int64_t rows, unsigned threads) {
  if (!may_start_early()) return 1;
  for (unsigned blocks = kMaxClusterBlocks; blocks > 1; blocks /= 2)
    if (rows * blocks <= device_limits().num_sms && threads >= 64 * blocks &&
        threads <= kClusterThreads * blocks)
      return blocks;
  return 1;
}

}  // namespace

void all_reduce_norm(const AllReduceNormArgs& args) {
  const AllReduceArgs& sum = args.sum;
  const RmsNormArgs& norm = args.norm;
  const int64_t rows = norm.out_act.rows, cols = norm.out_act.cols;
  FP4MOE_CHECK(
      sum.n == rows * cols && norm.x == sum.out && !sum.two_shot && sum.group.plane == nullptr &&
          cols % 4 == 0 && cols <= kMaxNormedCols &&
          sum.n <= max_sum_elements(sum.group, sum.bf16_partials, false) && may_be_sent(sum) &&
          (args.experts == nullptr || !sum.are_sent),
      "all_reduce_norm of " + std::to_string(rows) + " rows of " + std::to_string(cols) + " elements");
  const unsigned threads = num_norm_threads(cols);
  const unsigned cluster = cluster_blocks(rows, threads);
  const unsigned warps = threads / 32, block_warps = (warps + cluster - 1) / cluster;
  const NormKernel kernel = sum.bf16_partials ? norm_kernel_of<Bf16Words>(cols, cluster > 1)
                                              : norm_kernel_of<F32Words>(cols, cluster > 1);
  const auto clusters = static_cast<unsigned>(std::clamp<int64_t>(
      rows, 1,
      cluster > 1 ? rows
                  : resident_blocks(reinterpret_cast<const void*>(kernel), threads, sum.group.max_blocks)));
  launch("all_reduce_norm", kernel,
         {.grid = dim3(clusters * cluster), .block = dim3(block_warps * 32), .cluster = cluster},
         NormArgs{sum.group, sum.op, partial_rows(sum.partial, args.experts, cols), sum.out, norm.weight,
                  static_cast<bf16*>(norm.out_act.data), norm.out_f32, rows, cols, norm.eps,
                  static_cast<int>(threads), sum.are_sent});
}

}  // namespace fp4moe::cuda
