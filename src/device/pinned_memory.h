// Host memory that the GPU copies from and to at full speed, as Buffers and Arenas take it.
#pragma once

#include <cstdint>

#include "base/memory.h"

namespace fp4moe {

// Page-locked, usable with every device. kUnsupported without a device, or in a build without CUDA.
MemoryResource& pinned_memory();

// A copy between pinned or device memory, as one more thing asked of the calling thread's current stream.
// What goes wrong is kept by the stream.
void copy_async(void* to, const void* from, int64_t num_bytes);

}  // namespace fp4moe
