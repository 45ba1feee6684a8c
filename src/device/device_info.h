// This machine's GPUs, and whether this build can use them.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

struct DeviceInfo {
  std::string name;                // "NVIDIA H200"
  int compute_capability = 0;      // 10 major + minor
  int num_sms = 0;                 // that a rank may use: the GPU's, divided by ranks_per_gpu()
  int shared_bytes_per_block = 0;  // with opt-in
  int64_t l2_bytes = 0, memory_bytes = 0;
  // CUDA versions, 1000 major + 10 minor: the latest that the driver supports, and the one built with.
  int driver_version = 0, runtime_version = 0;

  int compute_major() const { return compute_capability / 10; }
};

// Raw results of CUDA runtime queries.
struct DeviceFacts {
  int ordinal = 0;  // of the GPU in question
  int num_devices = 0;
  int driver_version = 0;   // 0: no driver
  int runtime_version = 0;  // the one built with
  bool driver_too_old = false;
  std::string error;  // of querying the devices; empty: none
  DeviceInfo device;  // GPU `ordinal`, if it exists
};

// "13.0" for 13000.
std::string cuda_version_text(int version);
// kUnsupported with the reason: no driver, a driver older than the runtime (both versions), no device, no
// such ordinal (with the number of devices), or a GPU below compute capability 8.0. Pure.
Status check_device(const DeviceFacts& facts);
// Ranks that share a GPU: FP4MOE_RANKS_PER_GPU in the environment, 1 to 16, by default 1. For tests of more
// ranks than GPUs: each rank has a part of the SMs, and kernels do not overlap.
int ranks_per_gpu();
// GPU `ordinal`; fails as check_device(), and with kUnsupported in a build without CUDA.
Result<DeviceInfo> device_info(int ordinal);

}  // namespace fp4moe
