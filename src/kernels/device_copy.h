// Small copies from page-locked memory as one kernel: it waits for no copy engine, and reads the host while
// what is before it still runs.
#pragma once

#include <cstdint>

namespace fp4moe {

// Rows that lie stride_bytes apart on both sides, words of 4 bytes.
struct HostRows {
  void* to = nullptr;          // device memory
  const void* from = nullptr;  // page-locked
  int64_t stride_bytes = 0, row_bytes = 0, num_rows = 0;
};
struct CopyFromHostArgs {
  HostRows parts[2];
};

// One launch on the current stream.
using CopyFromHost = void (*)(const CopyFromHostArgs&);
// Null in a build without CUDA.
CopyFromHost cuda_copy_from_host();

}  // namespace fp4moe
