// Quantised activations on a GPU: what kernels/act_quant.h makes, bit for bit, and FP8 rows for w4a8.
// Conventions: kernels/device_moe.h.
#pragma once

#include <cstdint>

#include "kernels/device_moe.h"

namespace fp4moe {

enum class DeviceActQuantKind : uint8_t {
  kNvfp4Static,    // out = code * block scale (bf16); the tensor scale is the caller's (part of alpha)
  kNvfp4PerToken,  // the same with each row's own tensor scale: row_scales = rowamax / 2688
  // out = the codes of fp8_quantize_token() (formats/fp8.h), its s -> row_scales: NaN stays NaN, so that its
  // token's sums are NaN; a row of zeros has scale 0.
  kFp8PerToken,
};

struct DeviceActQuantArgs {
  DeviceActQuantKind kind = DeviceActQuantKind::kNvfp4Static;
  ActRows x;  // [T, K] bf16 or f32; K % 16 == 0
  // rows.counts null: every row of x is a row of out. Else out has the rows of experts: of x's rows the same
  // ones ([max_rows, K]), or with `gather` x's row slot / topk ([T, K], packed rows alone).
  DeviceRows rows;
  int64_t num_experts = 0;  // L of rows
  bool gather = false;
  int64_t topk = 1;
  const float* scales = nullptr;  // kNvfp4Static: encode scales, device memory: [L] if per_expert, else [1]
  bool per_expert = false;
  // NVFP4: bf16 [rows, K]; may be x itself without gather if x is bf16. FP8: kF8E4M3 slabs
  // (kernels/cuda/fp8_tile_layout.h) of out.rows rows, K past its end filled with zeros.
  ActRows out;
  float* row_scales = nullptr;  // per token: of out's rows (FP8: of the slabs' rows)
};

// On the current stream. Rows that no expert has are neither read nor written.
void cuda_quantize_act(const DeviceActQuantArgs& args);

}  // namespace fp4moe
