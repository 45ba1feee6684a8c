// The expert GEMMs of w4a16 on Hopper (sm90_expert_gemm.cu), behind DeviceMoeOps.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

void sm90_gate_up(const DeviceExpertArgs& a);
void sm90_down(const DeviceExpertArgs& a);
// Both in one launch; h is intermediate and rows.progress is not null. x_row_scales apply, h_row_scales are
// null.
void sm90_gate_up_down(const DeviceExpertArgs& a);

}  // namespace fp4moe
