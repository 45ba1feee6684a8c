// The tables of a build without CUDA.
#include "kernels/device_moe.h"
#include "kernels/device_peak.h"

namespace fp4moe {

const DenseOps* cuda_dense_ops() { return nullptr; }
const DeviceMoeOps* sm90_moe_ops() { return nullptr; }
const DeviceMoeOps* fallback_moe_ops() { return nullptr; }

#ifndef FP4MOE_HAS_CUDA
const DevicePeakOps* sm90_peak_ops() { return nullptr; }
#endif

}  // namespace fp4moe
