// Ops that move rows: embed, add, gather_rows, copy_heads, convert_rows, copies from the host, and copies of
// KV pages to and from the host.
//
// Computes:  as documented in kernels/ops.h and kernels/device_copy.h, element by element.
// Bytes:     the rows read and written.
// Bound:     HBM; at T = 1, the launch; for copies from and to the host, PCIe.
// Numerics:  exact, except that add and convert_rows round once.
#include <cuda_bf16.h>

#include "base/check.h"
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/kernel_mark.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/device_copy.h"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPerThread = 4;  // elements; few, so that even few rows make enough blocks

dim3 blocks_of(int64_t rows, int64_t cols) {
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(cols, kThreads * kPerThread)));
}

// Calls function(column) for this thread's columns in a row of `cols` columns.
template <class Function>
__device__ void each_column(int64_t cols, Function function) {
  const int64_t first = blockIdx.y * kThreads * kPerThread + threadIdx.x;
#pragma unroll
  for (int64_t j = 0; j < kPerThread; ++j)
    if (const int64_t i = first + j * kThreads; i < cols) function(i);
}

struct MarkedEmbed {
  EmbedArgs args;
  KernelMark mark;
};

// A step's first kernel. It lets dependents start only once the batch has arrived, so later kernels may read
// the batch without a wait.
__global__ void __launch_bounds__(kThreads) embed_kernel(const __grid_constant__ MarkedEmbed marked) {
  const EmbedArgs& a = marked.args;
  ptx::grid_dependency_wait();
  note_reached(marked.mark);
  ptx::grid_dependents_launch();
  const int64_t t = blockIdx.x;
  int64_t id = __ldcg(a.ids + t);
  if (id < 0) id = __ldcg(a.chosen.ids + ~id * a.chosen.stride);
  const bf16* row = a.table + id * a.hidden_size;
  each_column(a.hidden_size, [&](int64_t i) { a.out[t * a.hidden_size + i] = bf16_to_float(row[i]); });
}

__global__ void __launch_bounds__(kThreads) add_kernel(const __grid_constant__ AddArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t first = blockIdx.x * kThreads * kPerThread + threadIdx.x;
#pragma unroll
  for (int64_t j = 0; j < kPerThread; ++j)
    if (const int64_t i = first + j * kThreads; i < a.count) a.out[i] = __ldcg(a.out + i) + __ldcg(a.x + i);
}

__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const __grid_constant__ GatherRowsArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t words = a.row_bytes / 4;
  const auto* from = static_cast<const uint32_t*>(a.x) + __ldcg(a.rows + blockIdx.x) * words;
  auto* to = static_cast<uint32_t*>(a.out) + blockIdx.x * words;
  each_column(words, [&](int64_t i) { to[i] = __ldcg(from + i); });
}

__global__ void __launch_bounds__(kThreads) copy_heads_kernel(const __grid_constant__ CopyHeadsArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t t = blockIdx.x;
  each_column(a.num_heads * a.n, [&](int64_t i) {
    const int64_t head = i / a.n, at = i % a.n;
    a.out[t * a.out_stride + head * a.out_head_stride + at] =
        __ldcg(a.x + t * a.x_stride + head * a.x_head_stride + at);
  });
}

__global__ void __launch_bounds__(kThreads) convert_rows_kernel(const __grid_constant__ ConvertRowsArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t t = blockIdx.x;
  each_column(a.n, [&](int64_t i) {
    const float value = __ldcg(a.x + t * a.x_stride + i);
    const int64_t at = t * a.out_stride + i;
    if (a.out_dtype == DType::kF32)
      static_cast<float*>(a.out)[at] = value;
    else
      static_cast<__nv_bfloat16*>(a.out)[at] = __float2bfloat16_rn(value);
  });
}

// Grid (rows of all parts, blocks per row). A thread's first word is read before the wait, since the host
// wrote it.
__global__ void __launch_bounds__(kThreads)
    copy_from_host_kernel(const __grid_constant__ CopyFromHostArgs a) {
  int number = 0;
  int64_t row = blockIdx.x;
  while (row >= a.parts[number].num_rows) row -= a.parts[number++].num_rows;
  const HostRows& part = a.parts[number];
  const auto* from = reinterpret_cast<const volatile uint32_t*>(static_cast<const uint8_t*>(part.from) +
                                                                row * part.stride_bytes);
  auto* to = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(part.to) + row * part.stride_bytes);
  const int64_t words = part.row_bytes / 4, step = int64_t{gridDim.y} * kThreads;
  int64_t i = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  uint32_t word = i < words ? from[i] : 0;
  ptx::grid_dependency_wait();
  while (i < words) {
    to[i] = word;
    i += step;
    word = i < words ? from[i] : 0;
  }
}

// Grid (blocks per page, pages at a time). Each thread moves pieces of 16 bytes, numbered in canonical order,
// without other ranks' heads; several are in flight, since the host's memory is far away.
__global__ void __launch_bounds__(kThreads) copy_kv_pages_kernel(const __grid_constant__ KvPagesCopyArgs a) {
  constexpr uint32_t kInFlight = 4;
  ptx::grid_dependency_wait();
  const auto row_pieces = static_cast<uint32_t>(a.each.row_bytes / int64_t{sizeof(uint4)}),
             heads = static_cast<uint32_t>(a.each.num_heads), step = gridDim.x * kThreads;
  for (int number = static_cast<int>(blockIdx.y); number < a.num_pages;
       number += static_cast<int>(gridDim.y)) {
    KvPageCopyArgs one = a.each;
    one.page = a.pages[number].page;
    one.num_tokens = a.pages[number].num_tokens;
    one.canonical += a.pages[number].offset;
    const auto tokens = static_cast<uint32_t>(one.num_tokens);
    const uint32_t count = static_cast<uint32_t>(one.num_tensors) * tokens * heads * row_pieces;
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += kInFlight * step) {
      uint4 *to[kInFlight], piece[kInFlight];
#pragma unroll
      for (uint32_t j = 0; j < kInFlight; ++j) {
        const uint32_t at = i + j * step, row_at = at / row_pieces, token_at = row_at / heads;
        to[j] = nullptr;
        if (at >= count) continue;
        const KvPageCopyArgs::Row row = {token_at / tokens, token_at % tokens, row_at % heads};
        uint4* in_page = reinterpret_cast<uint4*>(one.pages) + one.index_in_pages(row) * row_pieces;
        uint4* on_host = reinterpret_cast<uint4*>(one.canonical) + one.index_in_canonical(row) * row_pieces;
        const uint32_t column = at % row_pieces;
        piece[j] = one.to_device ? __ldcv(on_host + column) : __ldcg(in_page + column);
        to[j] = (one.to_device ? in_page : on_host) + column;
      }
#pragma unroll
      for (uint32_t j = 0; j < kInFlight; ++j)
        if (to[j] != nullptr) *to[j] = piece[j];
    }
  }
}

}  // namespace

void embed(const EmbedArgs& args, ThreadPool&) {
  launch("embed", embed_kernel, {blocks_of(args.num_tokens, args.hidden_size), dim3(kThreads)},
         MarkedEmbed{args, {}});
}

void add(const AddArgs& args, ThreadPool&) {
  launch("add", add_kernel,
         {dim3(static_cast<unsigned>(ceil_div(args.count, kThreads * kPerThread))), dim3(kThreads)}, args);
}

void gather_rows(const GatherRowsArgs& args, ThreadPool&) {
  launch("gather_rows", gather_rows_kernel, {blocks_of(args.num_rows, args.row_bytes / 4), dim3(kThreads)},
         args);
}

// Grid (blocks per layer, layers).
__global__ void __launch_bounds__(kThreads) copy_state_kernel(const __grid_constant__ StateCopyArgs a) {
  ptx::grid_dependency_wait();
  float* const layer = a.layers + blockIdx.y * a.layer_elems;
  const int64_t elems = a.first_elems + a.second_elems, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < elems; i += step) {
    const bool is_first = i < a.first_elems;
    float* const part = is_first ? layer : layer + a.num_slots * a.first_elems;
    const int64_t stride = is_first ? a.first_elems : a.second_elems;
    const int64_t at = is_first ? i : i - a.first_elems;
    part[a.to * stride + at] = part[a.from * stride + at];
  }
}

void copy_heads(const CopyHeadsArgs& args, ThreadPool&) {
  launch("copy_heads", copy_heads_kernel,
         {blocks_of(args.num_tokens, args.num_heads * args.n), dim3(kThreads)}, args);
}

void convert_rows(const ConvertRowsArgs& args, ThreadPool&) {
  launch("convert_rows", convert_rows_kernel, {blocks_of(args.num_tokens, args.n), dim3(kThreads)}, args);
}

}  // namespace fp4moe::cuda

namespace fp4moe {

CopyFromHost cuda_copy_from_host() {
  return [](const CopyFromHostArgs& args) {
    constexpr int64_t kMaxBlocks = 64;
    int64_t words = 0, num_rows = 0;
    for (const HostRows& part : args.parts) {
      words = std::max(words, part.row_bytes / 4);
      num_rows += part.num_rows;
    }
    launch("copy_from_host", cuda::copy_from_host_kernel,
           {dim3(static_cast<unsigned>(num_rows),
                 static_cast<unsigned>(std::clamp<int64_t>(ceil_div(words, cuda::kThreads), 1, kMaxBlocks))),
            dim3(cuda::kThreads)},
           args);
  };
}

CopyState cuda_copy_state() {
  return [](const StateCopyArgs& args) {
    constexpr int64_t kMaxBlocks = 128;
    const int64_t blocks = ceil_div(args.first_elems + args.second_elems, int64_t{cuda::kThreads});
    launch("copy_state", cuda::copy_state_kernel,
           {dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks)), static_cast<unsigned>(args.num_layers)),
            dim3(cuda::kThreads)},
           args);
  };
}

CopyKvPages cuda_copy_kv_pages() {
  return [](const KvPagesCopyArgs& args) {
    // Enough for PCIe, and few enough to leave a step that runs beside them most of the SMs.
    constexpr int64_t kMostBlocks = 32, kPiecesOfThread = 8;
    const KvPageCopyArgs& each = args.each;
    FP4MOE_CHECK(each.row_bytes % int64_t{sizeof(uint4)} == 0,
                 "rows of " + std::to_string(each.row_bytes) + " bytes; legal: multiples of 16");
    FP4MOE_CHECK(args.num_pages > 0 && args.num_pages <= KvPagesCopyArgs::kMostPages,
                 std::to_string(args.num_pages) + " pages");
    const int64_t pieces =
        each.num_tensors * each.num_heads * each.page_size * each.row_bytes / int64_t{sizeof(uint4)};
    FP4MOE_CHECK(pieces < int64_t{1} << 31, std::to_string(pieces) + " pieces of a page");
    const int64_t pages = std::min<int64_t>(args.num_pages, kMostBlocks);
    const int64_t blocks =
        std::clamp<int64_t>(ceil_div(pieces, cuda::kThreads * kPiecesOfThread), 1, kMostBlocks / pages);
    launch("copy_kv_pages", cuda::copy_kv_pages_kernel,
           {dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(pages)), dim3(cuda::kThreads)}, args);
  };
}

}  // namespace fp4moe
