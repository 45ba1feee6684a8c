// The tables of a build without CUDA.
#include "kernels/device_moe.h"
#include "kernels/device_peak.h"
#include "kernels/device_sampler.h"

namespace fp4moe {

const DeviceMoeOps* sm90_moe_ops() { return nullptr; }
const DeviceMoeOps* fallback_moe_ops() { return nullptr; }

#ifndef FP4MOE_HAS_CUDA
const DenseOps* cuda_dense_ops() { return nullptr; }
Status prepare_cuda_dense_ops() { return unsupported("built without CUDA"); }
SampleRows cuda_sample_rows() { return nullptr; }
const DevicePeakOps* sm90_peak_ops() { return nullptr; }
#endif

}  // namespace fp4moe
