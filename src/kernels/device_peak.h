// The GPU work that benchmarks run besides the ops that they time: reads at full memory speed, a matmul, an
// empty kernel, filling buffers with random data. Implementation: kernels/cuda.
//
// All pointers are device memory; work is enqueued on the calling thread's current stream and can be
// captured.
#pragma once

#include <cstdint>

#include "formats/bf16.h"
#include "formats/fp4_matrix.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr int64_t kPeakMatmulWorkspace = 64 << 20;

struct Fp8FillArgs {
  Fp4Format format = Fp4Format::kMxfp4;
  uint8_t* weights = nullptr;
  int64_t n = 0, k = 0, num_matrices = 0;
  uint64_t seed = 0;
};

struct DevicePeakOps {
  // Reads num_bytes once into shared memory; num_bytes is a multiple of 16 KiB, data 16-byte aligned.
  void (*read)(const uint8_t* data, int64_t num_bytes);
  void (*empty)();
  // Computes out = b a^T (all [n, n], n % 8 == 0) with cuBLASLt's first choice and f32 sums; `workspace` has
  // kPeakMatmulWorkspace bytes. The first call for an n creates the plan: make it outside graph capture, and
  // always call from one thread. Returns kUnsupported if the library is missing.
  Status (*matmul)(const bf16* a, const bf16* b, bf16* out, int64_t n, uint8_t* workspace);
  // Fills dst [n] with random bits; the same seed gives the same bits.
  void (*fill_random)(uint64_t* dst, int64_t n, uint64_t seed);
  // Fills dst [n] with roughly normal values of standard deviation 1.
  void (*fill_normal)(bf16* dst, int64_t n, uint64_t seed);
  // Fills tiles (kernels/cuda/layout/tile_layout.h) with random codes; with a tensor scale of 1 their block
  // scales are 2^-8 to 2^-5 (MXFP4) or below 2^-4 (NVFP4).
  void (*fill_tiles)(Fp4Format format, uint8_t* tiles, int64_t num_tiles, uint64_t seed);
  // Fills num_matrices matrices [n, k] in the layout of kernels/cuda/layout/fp8_tile_layout.h with weights of
  // the same magnitude.
  void (*fill_fp8_tiles)(const Fp8FillArgs&);
};

// Returns the ops for Hopper, or null in a build without CUDA.
const DevicePeakOps* sm90_peak_ops();

}  // namespace fp4moe
