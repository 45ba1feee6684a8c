// The MoE ops for w4a8 on SM90: FP4 weights times FP8 tokens. Conventions: kernels/device_moe.h; layouts:
// kernels/cuda/layout/fp8_tile_layout.h; numerics: docs/numerics.md, "w4a8 on a GPU".
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

// Run the GEMMs of w4a8. The arguments are those of DeviceMoeOps, except that experts.gate_up and down are
// FP8 tiles, [L] matrices of fp8_tiled_bytes(); x and h are kF8E4M3 slabs (cuda_quantize_act) of x.rows rows,
// with x_row_scales and h_row_scales per slab row; gather is false; intermediate is bf16; down writes y_bf16.
// Masked counts do not exceed the capacity, and there are at most kFp8MaxExperts experts.
constexpr int64_t kFp8MaxExperts = 1024;
void sm90_fp8_gate_up(const DeviceExpertArgs& args);
void sm90_fp8_down(const DeviceExpertArgs& args);

// Returns Hopper's ops for FP8 tiles, whose gate_up and down are the functions above, or null in a build
// without CUDA.
const DeviceMoeOps* sm90_fp8_moe_ops();

}  // namespace fp4moe
