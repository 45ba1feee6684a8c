#include "kernels/cuda/ptx/launch.h"

namespace fp4moe {

const DeviceLimits& device_limits() {
  static const DeviceLimits limits = [] {
    DeviceLimits of_device;
    cudaDeviceGetAttribute(&of_device.num_sms, cudaDevAttrMultiProcessorCount, 0);
    cudaDeviceGetAttribute(&of_device.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    cudaDeviceGetAttribute(&of_device.compute_major, cudaDevAttrComputeCapabilityMajor, 0);
    return of_device;
  }();
  return limits;
}

}  // namespace fp4moe
