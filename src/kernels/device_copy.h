// Copies between page-locked host memory and the device. Each copy is one kernel, so that it does not wait
// for a copy engine.
#pragma once

#include <cstdint>

namespace fp4moe {

// Rows to copy in 4-byte words; they are stride_bytes apart on both sides.
struct HostRows {
  void* to = nullptr;          // device memory
  const void* from = nullptr;  // page-locked
  int64_t stride_bytes = 0, row_bytes = 0, num_rows = 0;
};
struct CopyFromHostArgs {
  HostRows parts[3];
};

// A copy, in either direction, of the first num_tokens rows of one page in every layer's keys and values
// (num_tensors tensors).
struct KvPageCopyArgs {
  uint8_t* pages = nullptr;      // device: [num_tensors, num_pages, num_heads, page_size, row_bytes]
  uint8_t* canonical = nullptr;  // page-locked: [num_tensors, num_tokens, num_heads, row_bytes]; both 16-byte
                                 // aligned, row_bytes % 16 == 0
  int64_t num_tensors = 0, num_pages = 0, num_heads = 0, page_size = 0, row_bytes = 0;
  int64_t page = 0, num_tokens = 0;
  bool to_device = false;
};

// Each is one launch on the current stream. CopyFromHost starts to read host memory while preceding kernels
// are still running.
using CopyFromHost = void (*)(const CopyFromHostArgs&);
using CopyKvPage = void (*)(const KvPageCopyArgs&);
// Both return null in a build without CUDA.
CopyFromHost cuda_copy_from_host();
CopyKvPage cuda_copy_kv_page();

}  // namespace fp4moe
