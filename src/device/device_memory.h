// The GPU's memory, as Buffers and Arenas take it.
#pragma once

#include <cstdint>

#include "base/memory.h"

namespace fp4moe {

// Plain allocations of device 0, 256-byte aligned; copies wait for all earlier work of the device that
// touches them only if it was synchronised. In a build without CUDA everything fails with kUnsupported.
MemoryResource& device_memory();

struct DeviceMemoryInfo {
  int64_t free_bytes = 0, total_bytes = 0;
};
Result<DeviceMemoryInfo> device_memory_info();

}  // namespace fp4moe
