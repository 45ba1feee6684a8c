// The expert GEMMs of w4a16 on Hopper, and those of w4a8 for few rows per expert (sm90_expert_gemm.cu). All
// take DeviceExpertArgs::returns.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

void sm90_gate_up(const DeviceExpertArgs& a);
void sm90_down(const DeviceExpertArgs& a);
// Runs gate_up and down in one launch. a.h must be a.intermediate, rows.progress must not be null, and
// h_row_scales must be null; x_row_scales are applied.
void sm90_gate_up_down(const DeviceExpertArgs& a);
// Like sm90_gate_up_down(), but for w4a8: FP8 tiles (fp8_tile_layout.h); x [T, H] holds the f16 values of
// e4m3 codes. The intermediate is written as bf16, then quantised in place to such values with scales
// h_row_scales [max_rows], which must also be a.h_row_scales.
void sm90_fp8_few_gate_up_down(const DeviceExpertArgs& a, float* h_row_scales);

}  // namespace fp4moe
