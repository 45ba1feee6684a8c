// GPU memory as a MemoryResource.
#pragma once

#include <cstdint>

#include "base/memory.h"

namespace fp4moe {

// cudaMalloc on device 0, 256-byte aligned. upload() and download() do not wait for work on other streams:
// synchronise these first. In a build without CUDA everything fails with kUnsupported.
MemoryResource& device_memory();

struct DeviceMemoryInfo {
  int64_t free_bytes = 0, total_bytes = 0;
};
Result<DeviceMemoryInfo> device_memory_info();

}  // namespace fp4moe
