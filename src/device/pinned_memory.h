// Pinned (page-locked) host memory as a MemoryResource, and asynchronous copies.
#pragma once

#include <cstdint>

#include "base/memory.h"

namespace fp4moe {

// Usable with every GPU. kUnsupported in a thread without a current GPU, or in a build without CUDA.
MemoryResource& pinned_memory();

// Enqueues a copy between pinned or device memory on the thread's current stream, which keeps errors.
void copy_async(void* to, const void* from, int64_t num_bytes);
// The same for rows with stride_bytes between their starts on both sides.
struct RowCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t stride_bytes = 0, row_bytes = 0, num_rows = 0;
};
void copy_rows_async(const RowCopy& copy);

}  // namespace fp4moe
