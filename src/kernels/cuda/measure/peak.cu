// Kernels that measure a GPU: read and empty.
//
// Computes: nothing. read copies a range into shared memory with bulk copies and discards it.
// Shapes: a range of num_bytes, cut into chunks of 16 KiB (4 KiB if 16 KiB would leave SMs idle); block b
//   reads the chunks b, b + grid, ...; each of the two blocks on an SM has 96 KiB in flight.
// Bytes: num_bytes read. Flops: none.
// Bound: memory. One thread of a block issues all of the block's copies; a stage is refilled as soon as it is
//        full.
// Numerics: none.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/measure/peak.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe {
namespace {

constexpr int kRingBytes = 96 * 1024, kBlocksPerSm = 2, kMaxStages = kRingBytes / 4096;
constexpr int64_t kLargeChunk = 16 * 1024, kSmallChunk = 4 * 1024;

struct ReadArgs {
  const uint8_t* data;  // [num_chunks, chunk_bytes]
  int64_t num_chunks;
  int chunk_bytes, num_stages;
};

__global__ void __launch_bounds__(32) peak_read_kernel(const __grid_constant__ ReadArgs args) {
  extern __shared__ __align__(128) uint8_t ring[];  // [num_stages, chunk_bytes]
  __shared__ uint64_t full[kMaxStages];
  if (threadIdx.x != 0) return;
  for (int s = 0; s < args.num_stages; ++s) ptx::mbarrier_init(&full[s], 1);
  ptx::mbarrier_init_fence();
  const int64_t mine = (args.num_chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto fetch = [&](int64_t i, int stage) {
    ptx::mbarrier_arrive_expect_tx(&full[stage], args.chunk_bytes);
    ptx::bulk_load(ring + stage * args.chunk_bytes,
                   args.data + (blockIdx.x + i * gridDim.x) * args.chunk_bytes, args.chunk_bytes,
                   &full[stage]);
  };
  for (int s = 0; s < args.num_stages && s < mine; ++s) fetch(s, s);
  int stage = 0;
  uint32_t parity = 0;
  for (int64_t i = 0; i < mine; ++i) {
    ptx::mbarrier_wait(&full[stage], parity);
    if (i + args.num_stages < mine) fetch(i + args.num_stages, stage);
    if (++stage == args.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__global__ void empty_kernel() {}

}  // namespace

void peak_read(const uint8_t* data, int64_t num_bytes) {
  if (num_bytes == 0) return;
  const int64_t grid = int64_t{kBlocksPerSm} * device_limits().num_sms;
  const bool large = num_bytes >= grid * kRingBytes / 2;
  ReadArgs args{.data = data};
  args.chunk_bytes = static_cast<int>(large ? kLargeChunk : kSmallChunk);
  args.num_stages = kRingBytes / args.chunk_bytes;
  args.num_chunks = num_bytes / args.chunk_bytes;
  const auto blocks = static_cast<unsigned>(std::min(grid, args.num_chunks));
  prepare_kernel(peak_read_kernel, {.shared_bytes = kRingBytes});
  Stream& stream = current_stream();
  peak_read_kernel<<<blocks, 32, kRingBytes, stream.handle()>>>(args);
  stream.check_launch("peak_read");
}

void peak_empty() {
  Stream& stream = current_stream();
  empty_kernel<<<1, 32, 0, stream.handle()>>>();
  stream.check_launch("peak_empty");
}

}  // namespace fp4moe
