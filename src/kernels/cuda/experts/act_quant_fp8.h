// The FP8 part of cuda_quantize_act(). Hopper only.
#pragma once

#include "kernels/device_act_quant.h"

namespace fp4moe {

void quantize_act_fp8(const DeviceActQuantArgs& args);

}  // namespace fp4moe
