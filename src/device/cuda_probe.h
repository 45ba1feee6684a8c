// What the CUDA runtime says of this machine.
#pragma once

#include <string>

namespace fp4moe {

// "1 CUDA device: NVIDIA H200, sm_90, 139.8 GiB", or why there is none, or "built without CUDA".
std::string describe_cuda();

}  // namespace fp4moe
