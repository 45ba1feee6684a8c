// GPU memory as a MemoryResource.
#pragma once

#include <cstdint>
#include <memory>

#include "base/memory.h"

namespace fp4moe {

class DeviceContext;

// Returns the memory of the thread's DeviceMemoryScope (device/placed_memory.h) or, without one, of the
// thread's current GPU: cudaMalloc, 256-byte aligned. The result stays a resource
// of that GPU and is usable in any thread. upload() and download() do not wait for work on other streams:
// synchronise those first. In a thread without a DeviceScope, and in a build without CUDA, all of its
// operations fail with kUnsupported.
MemoryResource& device_memory();

struct DeviceMemoryInfo {
  int64_t free_bytes = 0, total_bytes = 0;
};
// Returns the free and total memory of GPU `ordinal`.
Result<DeviceMemoryInfo> device_memory_info(int ordinal);

// Makes a GPU's memory resource for DeviceContext, which owns it.
std::unique_ptr<MemoryResource> make_device_memory(DeviceContext& device);

}  // namespace fp4moe
