// What stands for the GPU's ops in a build without CUDA.
#include "kernels/device_sampler.h"
#include "kernels/ops.h"

namespace fp4moe {

const DenseOps* cuda_dense_ops() { return nullptr; }
Status prepare_cuda_dense_ops() { return unsupported("built without CUDA"); }
SampleRows cuda_sample_rows() { return nullptr; }

}  // namespace fp4moe
