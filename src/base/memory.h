// MemoryResource: allocates a Buffer's bytes. host_memory() is here, device_memory() in
// device/device_memory.h.
#pragma once

#include <cstdint>

#include "fp4moe/status.h"

namespace fp4moe {

class MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  // At least 64-byte aligned. Precondition: num_bytes > 0. kDoesNotFit if the allocation fails.
  virtual Result<uint8_t*> allocate(int64_t num_bytes) = 0;
  virtual void release(uint8_t* data) = 0;
  // Copies between this memory and host memory; complete on return.
  virtual Status upload(void* to, const void* from_host, int64_t num_bytes) = 0;
  virtual Status download(void* to_host, const void* from, int64_t num_bytes) = 0;
  virtual bool is_host() const = 0;
};

// Allocations of 4 MiB or more are 2 MiB aligned and use madvise(MADV_HUGEPAGE).
MemoryResource& host_memory();

}  // namespace fp4moe
