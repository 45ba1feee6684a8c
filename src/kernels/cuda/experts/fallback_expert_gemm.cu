// Computes  the expert GEMMs of w4a16 and of bf16 experts (see kernels/device_moe.h) on GPUs that have no
//           specialised kernel.
// Shapes    weights in tiles (tile_layout.h), tokens [T, K] or [max_rows, K] bf16; a block has one tile of 64
//           weight rows and every eighth group of 32 tokens of an expert.
// Bytes     weights once for each 32 tokens, from L2 after the first time; tokens once for each weight tile.
// Bound     latency of plain loads: this is the fallback, correct on every GPU and tuned for none.
// Launch    compiled only to PTX of compute_80, which the driver compiles for any later GPU.
// Numerics  mma.sync m16n8k16 on exact bf16 weights, f32 sums in ascending K order; the same bits on every
//           run and for every number of tokens.
#include <cuda_runtime.h>

#include "base/check.h"
#include "device/stream.h"
#include "kernels/cuda/experts/fallback_expert_gemm.h"
#include "kernels/cuda/experts/fp4_dequant.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"

namespace fp4moe {
namespace {

constexpr int kThreads = 128, kTokens = 32, kTokenBlocks = 8;

enum class Epilogue : uint8_t { kGated, kRelu2, kDown };

struct GemmArgs {
  const uint8_t* weights;  // [L] matrices [weight_rows, K]
  int64_t weight_rows, k;
  const bf16* x;
  const float* x_row_scales;
  bool gather;
  int64_t topk;
  DeviceRows rows;
  const float* scales;  // [L, 3]
  const float* bias;
  Activation activation;
  int64_t cols;  // of out: I or H
  void* out;     // [max_rows, cols]
  bool out_is_f32;
};

__device__ float activate(const Activation& activation, float gate, float up) {
  if (activation.kind == ActivationKind::kSilu) return gate / (1 + expf(-gate)) * up;
  const float limit = activation.limit;
  gate = gate > limit ? limit : gate;  // NaN stays NaN
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1 + expf(-activation.alpha * gate)) * (up + activation.beta);
}

__device__ int64_t source_row(const GemmArgs& a, int64_t row) {
  return a.gather ? a.rows.slot_of_row[row] / a.topk : row;
}

// Computes the sums of the warp's 16 weight rows for 32 tokens: d[n][i] is token 8 n + 2 q + i % 2, row
// g + 8 (i / 2). x: the rows of this lane's tokens 8 n + g; a null row stands for zeros. stride: bytes to the
// tile of the next columns.
template <Fp4Format format>
__device__ void multiply(const GemmArgs& a, const uint8_t* tiles, int64_t stride, const bf16* const (&x)[4],
                         float (&d)[4][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
  TileWords<format> words;
  for (int64_t first = 0; first < a.k; first += kTileCols, tiles += stride) {
    words.load(tiles, warp, lane);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int64_t column = first + 16 * step + 2 * q;
      if (first + 16 * step >= a.k) break;
      uint32_t w[4];
      words.decode(step, w);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t b[2] = {0, 0};
        if (x[n] != nullptr) {
          b[0] = *reinterpret_cast<const uint32_t*>(x[n] + column);
          b[1] = *reinterpret_cast<const uint32_t*>(x[n] + column + 8);
        }
        ptx::mma_bf16(d[n], w, b[0], b[1]);
      }
    }
  }
}

__device__ void store(const GemmArgs& a, int64_t row, int64_t col, float v) {
  if (a.out_is_f32)
    static_cast<float*>(a.out)[row * a.cols + col] = v;
  else
    static_cast<__nv_bfloat16*>(a.out)[row * a.cols + col] = __float2bfloat16_rn(v);
}

// Finishes the sums of rows r and r + 8 of the expert's weights for one token, and stores the results in out.
template <Epilogue epilogue>
__device__ void finish(const GemmArgs& a, int64_t row, int64_t r, float sum0, float sum1) {
  const int expert = blockIdx.y;
  const float* scales = a.scales + expert * 3;
  const float x_scale = a.x_row_scales == nullptr ? 1 : a.x_row_scales[source_row(a, row)];
  if constexpr (epilogue == Epilogue::kGated) {
    const int64_t col = r / 64 * 32 + r % 64 / 16 * 8 + r % 8;
    if (col >= a.cols) return;
    const float* bias = a.bias == nullptr ? nullptr : a.bias + expert * 2 * a.cols + col;
    const float gate = sum0 * scales[0] * x_scale + (bias == nullptr ? 0 : bias[0]);
    const float up = sum1 * scales[1] * x_scale + (bias == nullptr ? 0 : bias[a.cols]);
    store(a, row, col, activate(a.activation, gate, up));
    return;
  }
  const float scale = scales[epilogue == Epilogue::kDown ? 2 : 1] * x_scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t col = r + 8 * half;
    if (col >= a.cols) return;
    float v = (half == 0 ? sum0 : sum1) * scale;
    if (a.bias != nullptr) v += a.bias[expert * a.cols + col];
    if (epilogue == Epilogue::kRelu2) v = v < 0 ? 0 : v * v;
    store(a, row, col, v);
  }
}

template <Fp4Format format, Epilogue epilogue>
__global__ void __launch_bounds__(kThreads) fallback_gemm(const __grid_constant__ GemmArgs a) {
  const int expert = blockIdx.y, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const bool packed = a.rows.capacity == 0;
  int64_t count = a.rows.counts[expert];
  if (!packed) count = min(count, a.rows.capacity);
  const int64_t first_row = packed ? a.rows.offsets[expert] : expert * a.rows.capacity;
  const uint8_t* tiles = a.weights + expert * tiled_bytes(format, a.weight_rows, a.k) +
                         tile_index(gridDim.x, num_tiles(a.k), blockIdx.x, 0) * tile_bytes(format);
  const int64_t stride = tile_group_size(gridDim.x, blockIdx.x) * tile_bytes(format);
  for (int64_t first = blockIdx.z * kTokens; first < count; first += kTokenBlocks * kTokens) {
    const bf16* x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int64_t token = first + 8 * n + g;
      x[n] = token < count ? a.x + source_row(a, first_row + token) * a.k : nullptr;
    }
    float d[4][4] = {};
    multiply<format>(a, tiles, stride, x, d);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t token = first + 8 * n + 2 * q + i;
        if (token < count)
          finish<epilogue>(a, first_row + token, blockIdx.x * 64 + warp * 16 + g, d[n][i], d[n][2 + i]);
      }
  }
}

template <Epilogue epilogue>
void launch(Fp4Format format, const GemmArgs& a, int64_t num_experts) {
  if (a.rows.max_rows == 0 || num_experts == 0) return;
  const dim3 grid(static_cast<unsigned>(num_tiles(a.weight_rows)), static_cast<unsigned>(num_experts),
                  kTokenBlocks);
  Stream& stream = current_stream();
  if (format == Fp4Format::kMxfp4)
    fallback_gemm<Fp4Format::kMxfp4, epilogue><<<grid, kThreads, 0, stream.handle()>>>(a);
  else if (format == Fp4Format::kNvfp4)
    fallback_gemm<Fp4Format::kNvfp4, epilogue><<<grid, kThreads, 0, stream.handle()>>>(a);
  else
    fallback_gemm<Fp4Format::kNone, epilogue><<<grid, kThreads, 0, stream.handle()>>>(a);
  stream.check_launch("fallback_gemm");
}

GemmArgs gemm_args(const DeviceExpertArgs& args, const ActRows& x, int64_t weight_rows) {
  FP4MOE_CHECK(x.dtype == DType::kBF16, "expert rows must be bf16");
  GemmArgs a = {};
  a.weight_rows = weight_rows;
  a.k = x.cols;
  a.x = static_cast<const bf16*>(x.data);
  a.topk = args.topk;
  a.rows = args.rows;
  a.scales = args.experts.scales;
  a.activation = args.experts.activation;
  return a;
}

}  // namespace

void fallback_gate_up(const DeviceExpertArgs& args) {
  const TiledExperts& e = args.experts;
  const bool gated = is_gated(e.activation.kind);
  GemmArgs a = gemm_args(args, args.x, (gated ? 2 : 1) * e.intermediate_size);
  a.weights = e.gate_up;
  a.x_row_scales = args.x_row_scales;
  a.gather = args.gather;
  a.bias = e.gate_up_bias;
  a.cols = e.intermediate_size;
  a.out = args.intermediate.data;
  a.out_is_f32 = args.intermediate.dtype == DType::kF32;
  if (gated)
    launch<Epilogue::kGated>(e.format, a, e.num_experts);
  else
    launch<Epilogue::kRelu2>(e.format, a, e.num_experts);
}

void fallback_down(const DeviceExpertArgs& args) {
  const TiledExperts& e = args.experts;
  GemmArgs a = gemm_args(args, args.h, e.hidden_size);
  a.weights = e.down;
  a.x_row_scales = args.h_row_scales;
  a.bias = e.down_bias;
  a.cols = e.hidden_size;
  a.out_is_f32 = args.y_bf16 == nullptr;
  a.out = a.out_is_f32 ? static_cast<void*>(args.y) : args.y_bf16;
  launch<Epilogue::kDown>(e.format, a, e.num_experts);
}

}  // namespace fp4moe
