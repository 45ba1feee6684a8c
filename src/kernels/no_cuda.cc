// The tables of a build without CUDA.
#include "kernels/device_moe.h"

namespace fp4moe {

const DenseOps* cuda_dense_ops() { return nullptr; }
const DeviceMoeOps* sm90_moe_ops() { return nullptr; }
const DeviceMoeOps* fallback_moe_ops() { return nullptr; }

}  // namespace fp4moe
