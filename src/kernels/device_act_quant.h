// Quantises activations on a GPU: with the same bits as kernels/act_quant.h, or to FP8 rows for w4a8.
// Conventions: kernels/device_moe.h.
#pragma once

#include <cstdint>

#include "kernels/device_moe.h"

namespace fp4moe {

enum class DeviceActQuantKind : uint8_t {
  kNvfp4Static,    // out = code * block scale (bf16); the caller applies the tensor scale (in alpha)
  kNvfp4PerToken,  // the same with one tensor scale per row: row_scales = rowamax / 2688
  // out = the codes of fp8_quantize_token() (formats/fp8.h); scale -> row_scales. A NaN stays NaN, so that
  // the token's sums are NaN; a row of zeros has scale 0.
  kFp8PerToken,
};

struct DeviceActQuantArgs {
  DeviceActQuantKind kind = DeviceActQuantKind::kNvfp4Static;
  ActRows x;  // [T, K] bf16 or f32; K % 16 == 0
  // rows.counts null: row r of out is computed from row r of x. Otherwise out has the experts' rows, read
  // from the same rows of x ([max_rows, K]) or, with `gather`, from row slot / topk of x ([T, K]; packed rows
  // only).
  DeviceRows rows;
  int64_t num_experts = 0;  // L, for `rows`
  bool gather = false;
  int64_t topk = 1;
  const float* scales = nullptr;  // kNvfp4Static: encode scales, device memory: [L] if per_expert, else [1]
  bool per_expert = false;
  // NVFP4: bf16 [rows, K]; may alias x if x is bf16 and `gather` is false. FP8: kF8E4M3 slabs
  // (kernels/cuda/layout/fp8_tile_layout.h) of out.rows rows; columns past K are zero.
  ActRows out;
  float* row_scales = nullptr;  // per-token kinds: one per row of out (FP8: one per slab row)
};

// Quantises x on the current stream. Rows that belong to no expert are neither read nor written.
void cuda_quantize_act(const DeviceActQuantArgs& args);

}  // namespace fp4moe
