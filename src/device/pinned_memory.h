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
// The same of rows that lie stride_bytes apart on both sides.
struct RowCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t stride_bytes = 0, row_bytes = 0, num_rows = 0;
};
void copy_rows_async(const RowCopy& copy);

}  // namespace fp4moe
