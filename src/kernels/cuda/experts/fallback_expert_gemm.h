// The expert GEMMs of w4a16 on any GPU since Ampere (fallback_expert_gemm.cu), used through DeviceMoeOps.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

void fallback_gate_up(const DeviceExpertArgs& args);
void fallback_down(const DeviceExpertArgs& args);

}  // namespace fp4moe
