// What this machine's GPU is, and whether this build can use it.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

struct DeviceInfo {
  std::string name;            // "NVIDIA H200"
  int compute_capability = 0;  // 10 major + minor
  int num_sms = 0;
  int64_t l2_bytes = 0, memory_bytes = 0;
  int driver_version = 0, runtime_version = 0;  // 1000 major + 10 minor; the driver's is what it supports
};

// What the CUDA runtime says before it is judged.
struct DeviceFacts {
  int num_devices = 0;
  int driver_version = 0;   // 0: no driver
  int runtime_version = 0;  // that this build was made with
  bool driver_too_old = false;
  std::string error;  // of counting the devices; empty: none
  DeviceInfo device;  // number 0, if there is one
};

// "13.0" of 13000.
std::string cuda_version_text(int version);
// kUnsupported, saying which: no driver, a driver older than the runtime (both versions), no device, or a
// GPU below compute capability 8.0. Pure.
Status check_device(const DeviceFacts& facts);
// Of device 0; what check_device() says, or that this build is without CUDA.
Result<DeviceInfo> device_info();

}  // namespace fp4moe
