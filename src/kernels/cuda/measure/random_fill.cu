// Fills device memory with random data: bits, normal bf16 values, weight tiles.
//
// Computes: element i is a hash of (seed, i), so it does not depend on the launch.
// Shapes: dst [n] of 64-bit words, bf16, or tiles of kernels/cuda/layout.
// Bytes: the bytes written. Flops: none.
// Bound: memory.
// Numerics: fill_normal adds four uniform 16-bit pieces (standard deviation 1, magnitude at most 3.5). Every
//   code word of a tile is valid; scale bytes stay in the range documented in device_peak.h.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "device/stream.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/cuda/measure/peak.h"

namespace fp4moe {
namespace {

constexpr int kThreads = 256;

// The finaliser of splitmix64 (Steele, Lea and Flood 2014).
__device__ uint64_t hash(uint64_t seed, int64_t i) {
  uint64_t z = seed + 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(i + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__global__ void fill_random_kernel(uint64_t* dst, int64_t n, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < n; i += step) dst[i] = hash(seed, i);
}

__global__ void fill_normal_kernel(__nv_bfloat16* dst, int64_t n, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < n; i += step) {
    const uint64_t bits = hash(seed, i);
    int sum = 0;
    for (int piece = 0; piece < 4; ++piece) sum += static_cast<int>(bits >> (16 * piece) & 0xFFFF);
    constexpr float kDeviation = 37837.2f;  // of the sum: 65536 * sqrt(4 / 12)
    dst[i] = __float2bfloat16(static_cast<float>(sum - 131070) / kDeviation);
  }
}

// Makes eight scale bytes from eight random bytes.
template <Fp4Format kFormat>
__device__ uint64_t scale_bytes(uint64_t bits) {
  constexpr uint64_t kEach = 0x0101010101010101ull;
  // MXFP4: 245 + (0 ... 3): 2^-8 ... 2^-5. NVFP4: exponent 16 + (0 ... 3), any mantissa.
  if constexpr (kFormat == Fp4Format::kMxfp4) return 245 * kEach + (bits & 3 * kEach);
  return 128 * kEach + (bits & 31 * kEach);
}

template <Fp4Format kFormat>
__global__ void fill_tiles_kernel(uint64_t* tiles, int64_t num_words, uint64_t seed) {
  constexpr int64_t kCodeWords = kTileCodeBytes / 8, kTileWords = tile_bytes(kFormat) / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < num_words; i += step) {
    const uint64_t bits = hash(seed, i);
    tiles[i] = i % kTileWords < kCodeWords ? bits : scale_bytes<kFormat>(bits);
  }
}

struct Fp8Fill {
  uint64_t* words;
  int64_t num_words, matrix_words, tiles_words;  // of all, of a matrix, of its tiles before the row factors
  uint64_t seed;
};

// Scales are indices of 2^0 ... 2^3 (MXFP4) or e4m3 bytes of 2 ... 30, which count as 1/8 of that (NVFP4);
// row factors are 2^-8.
template <Fp4Format kFormat>
__global__ void fill_fp8_tiles_kernel(const __grid_constant__ Fp8Fill fill) {
  constexpr int64_t kCodeWords = kFp8CodeBytes / 8, kTileWords = fp8_tile_bytes(kFormat) / 8;
  constexpr uint64_t kEach = 0x0101010101010101ull, kFactors = 0x3B8000003B800000ull;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < fill.num_words; i += step) {
    const int64_t at = i % fill.matrix_words;
    const uint64_t bits = hash(fill.seed, i);
    if (at >= fill.tiles_words)
      fill.words[i] = kFactors;
    else if (at % kTileWords < kCodeWords)
      fill.words[i] = bits;
    else if constexpr (kFormat == Fp4Format::kMxfp4)
      fill.words[i] = 64 * kEach + (bits & 24 * kEach);
    else
      fill.words[i] = 64 * kEach + (bits & 31 * kEach);
  }
}

unsigned blocks_for(int64_t n) {
  return static_cast<unsigned>(std::clamp<int64_t>((n + kThreads - 1) / kThreads, 1, 4096));
}

}  // namespace

void fill_random(uint64_t* dst, int64_t n, uint64_t seed) {
  Stream& stream = current_stream();
  fill_random_kernel<<<blocks_for(n), kThreads, 0, stream.handle()>>>(dst, n, seed);
  stream.check_launch("fill_random");
}

void fill_normal(bf16* dst, int64_t n, uint64_t seed) {
  Stream& stream = current_stream();
  fill_normal_kernel<<<blocks_for(n), kThreads, 0, stream.handle()>>>(reinterpret_cast<__nv_bfloat16*>(dst),
                                                                      n, seed);
  stream.check_launch("fill_normal");
}

void fill_tiles(Fp4Format format, uint8_t* tiles, int64_t num_tiles, uint64_t seed) {
  const int64_t num_words = num_tiles * tile_bytes(format) / 8;
  auto* const words = reinterpret_cast<uint64_t*>(tiles);
  Stream& stream = current_stream();
  if (format == Fp4Format::kMxfp4)
    fill_tiles_kernel<Fp4Format::kMxfp4>
        <<<blocks_for(num_words), kThreads, 0, stream.handle()>>>(words, num_words, seed);
  else
    fill_tiles_kernel<Fp4Format::kNvfp4>
        <<<blocks_for(num_words), kThreads, 0, stream.handle()>>>(words, num_words, seed);
  stream.check_launch("fill_tiles");
}

void fill_fp8_tiles(const Fp8FillArgs& args) {
  const int64_t matrix = fp8_tiled_bytes(args.format, args.n, args.k) / 8;
  const Fp8Fill fill = {.words = reinterpret_cast<uint64_t*>(args.weights),
                        .num_words = args.num_matrices * matrix,
                        .matrix_words = matrix,
                        .tiles_words = fp8_row_factors_offset(args.format, args.n, args.k) / 8,
                        .seed = args.seed};
  Stream& stream = current_stream();
  const auto kernel = args.format == Fp4Format::kMxfp4 ? fill_fp8_tiles_kernel<Fp4Format::kMxfp4>
                                                       : fill_fp8_tiles_kernel<Fp4Format::kNvfp4>;
  kernel<<<blocks_for(fill.num_words), kThreads, 0, stream.handle()>>>(fill);
  stream.check_launch("fill_fp8_tiles");
}

}  // namespace fp4moe
