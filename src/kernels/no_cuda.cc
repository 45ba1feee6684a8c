// The tables of a build without CUDA.
#include "kernels/device_moe.h"
#include "kernels/device_peak.h"

namespace fp4moe {

#ifndef FP4MOE_HAS_CUDA
const DeviceMoeOps* sm90_moe_ops() { return nullptr; }
const DevicePeakOps* sm90_peak_ops() { return nullptr; }
#endif
const DeviceMoeOps* fallback_moe_ops() { return nullptr; }

}  // namespace fp4moe
