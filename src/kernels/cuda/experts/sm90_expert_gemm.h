// The expert GEMMs of w4a16 on Hopper, and those of w4a8 for few rows per expert (sm90_expert_gemm.cu).
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

void sm90_gate_up(const DeviceExpertArgs& a);
void sm90_down(const DeviceExpertArgs& a);
// Both in one launch; h is intermediate and rows.progress is not null. x_row_scales apply, h_row_scales are
// null.
void sm90_gate_up_down(const DeviceExpertArgs& a);
// The same for w4a8: FP8 tiles (fp8_tile_layout.h); x [T, H] holds the f16 values of e4m3 codes. The
// intermediate is bf16, then quantised in place as x is, with h_row_scales [max_rows], which are
// a.h_row_scales too.
void sm90_fp8_few_gate_up_down(const DeviceExpertArgs& a, float* h_row_scales);

}  // namespace fp4moe
