// This machine's GPUs, and whether this build can use them.
#pragma once

#include <cstdint>
#include <string>

#include "device/gpu_uuid.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct DeviceInfo {
  std::string name;  // "NVIDIA H200"
  GpuUuid uuid{};
  int compute_capability = 0;      // 10 major + minor
  int num_sms = 0;                 // SMs that a rank may use: the GPU's, divided by ranks_per_gpu()
  int shared_bytes_per_block = 0;  // maximum, with opt-in
  int64_t l2_bytes = 0, memory_bytes = 0;
  // CUDA versions, 1000 major + 10 minor: the latest that the driver supports, and the one of this build.
  int driver_version = 0, runtime_version = 0;

  int compute_major() const { return compute_capability / 10; }
};

// Raw results of CUDA runtime queries.
struct DeviceFacts {
  int ordinal = 0;  // of the queried GPU
  int num_devices = 0;
  int driver_version = 0;   // 0: no driver
  int runtime_version = 0;  // the CUDA version of this build
  bool driver_too_old = false;
  std::string error;  // from querying the devices; empty: none
  DeviceInfo device;  // GPU `ordinal`, if it exists
};

// Returns "13.0" for 13000.
std::string cuda_version_text(int version);
// Returns OK, or kUnsupported with the reason: no driver, a driver older than the runtime (with both
// versions), no device, no such ordinal (with the number of devices), or a GPU below compute capability 8.0.
// A pure function.
Status check_device(const DeviceFacts& facts);
// Returns the number of ranks that share a GPU: FP4MOE_RANKS_PER_GPU in the environment, 1 to 16, by default
// 1. For tests with more ranks than GPUs: each rank has a part of the SMs, and no kernel starts before the
// previous one in its stream has ended.
int ranks_per_gpu();
constexpr int kHardwareQueues = 32;  // of a GPU, at most; more streams share queues
// Returns the properties of GPU `ordinal`. Fails as check_device() does, and with kUnsupported in a build
// without CUDA.
Result<DeviceInfo> device_info(int ordinal);

}  // namespace fp4moe
