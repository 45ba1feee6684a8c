#include "device/cuda_probe.h"

#ifdef FP4MOE_HAS_CUDA
#include <cuda_runtime_api.h>

#include <cstdio>
#endif

namespace fp4moe {

#ifdef FP4MOE_HAS_CUDA

std::string describe_cuda() {
  int num_devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&num_devices);
  if (status != cudaSuccess) return std::string("no usable CUDA device: ") + cudaGetErrorString(status);
  std::string text = std::to_string(num_devices) + (num_devices == 1 ? " CUDA device" : " CUDA devices");
  for (int i = 0; i < num_devices; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    char line[320];
    std::snprintf(line, sizeof line, "%s %s, sm_%d%d, %.1f GiB", i == 0 ? ":" : ";", properties.name,
                  properties.major, properties.minor,
                  static_cast<double>(properties.totalGlobalMem) / (1024.0 * 1024 * 1024));
    text += line;
  }
  return text;
}

#else

std::string describe_cuda() { return "built without CUDA"; }

#endif

}  // namespace fp4moe
