// MemoryResource: where a Buffer's bytes are. The host's memory is here, a GPU's in device/device_memory.h.
#pragma once

#include <cstdint>

#include "fp4moe/status.h"

namespace fp4moe {

class MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  // num_bytes > 0, 64-byte aligned or better. kDoesNotFit if the system refuses.
  virtual Result<uint8_t*> allocate(int64_t num_bytes) = 0;
  virtual void release(uint8_t* data) = 0;
  // Between this memory and the host's; done on return.
  virtual Status upload(void* to, const void* from_host, int64_t num_bytes) = 0;
  virtual Status download(void* to_host, const void* from, int64_t num_bytes) = 0;
  virtual bool is_host() const = 0;
};

// 2 MiB aligned and advised to huge pages from 4 MiB on.
MemoryResource& host_memory();

}  // namespace fp4moe
