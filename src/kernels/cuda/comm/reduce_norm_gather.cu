// The sum of many rows over the GPUs of a group, added to the residual, and the RMS norm of the residual:
// each rank adds and norms its share of the rows, and sends the normed rows to its peers.
//
// Computes:  for this rank's rows of out [T, H]: out += sum over ranks r, in order, of partial_r, f32, each
//            rounded to bf16 first if it is sent as bf16. y = out / sqrt(mean(out^2) + eps) * weight as bf16,
//            for all rows, and as f32, for this rank's. partial_r can be the weighted sums of its experts'
//            rows (MoeCombineArgs).
// Shapes:    H a multiple of 4, up to kMaxNormedCols; any shares whose words fit in the heap.
// Bytes:     (w + 2) T H / R to each of R - 1 peers, with w = 4 or 2; of local memory T H (4 + 2) of partials
//            and y, and T H / R (4 + 4 + 4 + 3 w (R - 1)) of the residual, y as f32 and received words.
// Flops:     (R + 4) T H / R.
// Bound:     the links.
// Numerics:  those of all_reduce_norm.cu, with the same bits.
//
// A block takes rows of its rank's share in turn. It sends each peer the partials of one of the peer's rows,
// and takes, adds and norms one of its own. A peer that has sent its partials no longer reads its normed
// rows, because every kernel before its sum has ended. Words mark the partials as sent; a flag for each block
// follows its normed rows.
#include <algorithm>
#include <string>

#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/comm/summed_rows.cuh"

namespace fp4moe::cuda {
namespace {

struct ShareArgs {
  CommGroup group;
  CommOp op;
  PartialRows partials;
  float* out;
  const float* weight;
  float* f32;  // or null
  int64_t first[kMaxGroupRanks + 1];
  int64_t skipped, rows;  // of each share
  int64_t cols;
  float eps;

  // Row i of rank r's rows in this operation, if it has that many.
  __device__ __forceinline__ int64_t row(int r, int64_t i) const { return first[r] + skipped + i; }
  __device__ __forceinline__ bool has_row(int r, int64_t i) const {
    return i < rows && row(r, i) < first[r + 1];
  }
};

// Calls f(peer) for each peer, beginning after this rank, so that each rank receives from one at a time.
template <class Function>
__device__ __forceinline__ void for_peers(const CommGroup& group, const Function& f) {
#pragma unroll 1
  for (int d = 1; d < group.size; ++d)
    f(group.rank + d < group.size ? group.rank + d : group.rank + d - group.size);
}

template <class Format, int kVectors>
__device__ __forceinline__ void add_and_norm_share(const ShareArgs& a) {
  using RowPart = RowPart<kVectors>;
  ptx::grid_dependents_launch();
  const RowThread<kVectors> thread{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                   static_cast<int>(a.cols / 4)};
  RowPart weight{};
  thread.for_vectors(
      [&](int j, int i) { weight.v[j] = __ldg(reinterpret_cast<const float4*>(a.weight) + i); });
  ptx::grid_dependency_wait();
  const Operation o(a.group, a.op);
  if (o.failed) return;
  const int me = a.group.rank, size = a.group.size;
  const auto words = [&](int rank, int source, int64_t i) {
    return words_at<typename Format::Words>(o, rank, source) + i * thread.vectors;
  };
  const auto send_partials = [&](int64_t i) {
    for_peers(a.group, [&](int peer) {
      if (!a.has_row(peer, i)) return;
      const RowPart part = a.partials.row(a.row(peer, i), thread);
      thread.for_vectors([&](int j, int v) { store_words(words(peer, me, i) + v, Format::of(part.v[j])); });
    });
  };
  send_partials(blockIdx.x);
  for (int64_t i = blockIdx.x; i < a.rows; i += gridDim.x) {
    const bool has_row = a.has_row(me, i);
    const int64_t at = a.row(me, i) * a.cols;
    RowPart mine{}, residual{}, sum{};
    if (has_row) mine = a.partials.row(a.row(me, i), thread), residual = RowPart::load(a.out + at, thread);
    send_partials(i + gridDim.x);  // the links carry them during the sum
    if (!has_row) continue;
    for (float4& v : mine.v) v = Format::values(Format::of(v));
#pragma unroll 1
    for (int r = 0; r < size; ++r) sum += r == me ? mine : take_row<Format>(o, r, words(me, r, i), thread);
    residual += sum;
    float squares = 0;
    for (const float4& v : residual.v) squares = sum_of_squares(squares, v);
    const float inverse = inverse_rms(block_sum(squares), a.cols, a.eps);
    thread.for_vectors([&](int j, int v) {
      const float4 y = normed(residual.v[j], inverse, weight.v[j]);
      reinterpret_cast<float4*>(a.out + at)[v] = residual.v[j];
      if (a.f32 != nullptr) reinterpret_cast<float4*>(a.f32 + at)[v] = y;
      const uint2 act = bf16_words(y);
#pragma unroll 1
      for (int r = 0; r < size; ++r)
        reinterpret_cast<uint2*>(a.group.regions[r] + a.group.layout.normed + at * int64_t{sizeof(bf16)})[v] =
            act;
    });
    __syncthreads();  // before the next row's block_sum()
  }
  __syncthreads();
  raise_flags(o, blockIdx.x);
  wait_for_flag(o, blockIdx.x);
}

template <class Format>
__global__ void __launch_bounds__(kNarrowThreads, 2)
    narrow_share_kernel(const __grid_constant__ ShareArgs a) {
  add_and_norm_share<Format, 1>(a);
}
template <class Format>
__global__ void __launch_bounds__(kMaxNormThreads) share_kernel(const __grid_constant__ ShareArgs a) {
  add_and_norm_share<Format, kMaxVectors>(a);
}
template <class Format>
void (*kernel_of(int64_t cols))(ShareArgs) {
  return cols <= 4 * kNarrowThreads ? narrow_share_kernel<Format> : share_kernel<Format>;
}

}  // namespace

void reduce_norm_gather(const ReduceNormGatherArgs& args) {
  const CommGroup& group = args.group;
  const RmsNormArgs& norm = args.norm;
  const int64_t cols = norm.out_act.cols, words = args.rows * cols * (args.bf16_partials ? 2 : 4);
  FP4MOE_CHECK(norm.x == args.out && group.plane == nullptr && cols % 4 == 0 && cols <= kMaxNormedCols &&
                   words <= group.layout.word_bytes && args.first[group.size] <= norm.out_act.rows &&
                   norm.out_act.data == group.regions[group.rank] + group.layout.normed &&
                   norm.out_act.rows * cols * int64_t{sizeof(bf16)} <= group.layout.normed_bytes,
               "reduce_norm_gather of " + std::to_string(norm.out_act.rows) + " rows of " +
                   std::to_string(cols) + " elements, " + std::to_string(args.rows) + " of a share");
  const unsigned threads = num_norm_threads(cols);
  const auto kernel = args.bf16_partials ? kernel_of<Bf16Words>(cols) : kernel_of<F32Words>(cols);
  // The number is the same on every rank, since each block waits for those of its peers.
  const int64_t most = resident_blocks(reinterpret_cast<const void*>(kernel), threads, group.max_blocks);
  const auto blocks = std::clamp<int64_t>(args.rows, 1, std::min<int64_t>(most, kMaxCommBlocks));
  ShareArgs a{.group = group,
              .op = args.op,
              .partials = partial_rows(args.partial, args.experts, cols),
              .out = args.out,
              .weight = norm.weight,
              .f32 = norm.out_f32,
              .first = {},
              .skipped = args.skipped,
              .rows = args.rows,
              .cols = cols,
              .eps = norm.eps};
  std::copy_n(args.first, group.size + 1, a.first);
  launch("reduce_norm_gather", kernel, {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(threads)},
         a);
}

}  // namespace fp4moe::cuda
