// Pinned (page-locked) host memory as a MemoryResource, and asynchronous copies.
#pragma once

#include <cstdint>

#include "base/memory.h"

namespace fp4moe {

// Returns the pinned memory, which is usable with every GPU. Allocations fail with kUnsupported in a thread
// without a current GPU, or in a build without CUDA.
MemoryResource& pinned_memory();

// Enqueues a copy from and to pinned or device memory on the thread's current stream, which keeps any error.
void copy_async(void* to, const void* from, int64_t num_bytes);
// The same for rows whose starts are stride_bytes apart on both sides.
struct RowCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t stride_bytes = 0, row_bytes = 0, num_rows = 0;
};
void copy_rows_async(const RowCopy& copy);

}  // namespace fp4moe
