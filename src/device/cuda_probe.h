// Describes a GPU in one line.
#pragma once

#include <string>

namespace fp4moe {

// Returns text such as "NVIDIA H200, sm_90, 132 SMs, 139.8 GiB, driver for CUDA 13.0, built with 13.0" for
// GPU `ordinal`, or why the GPU cannot be used (device_info()), or "built without CUDA".
std::string describe_cuda(int ordinal);

}  // namespace fp4moe
