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

// A copy, in either direction, of the first num_tokens tokens of one page in every layer's keys and values
// (num_tensors tensors). `pages` has heads [first_head, first_head + num_heads) of all_heads; the rows of
// other heads in `canonical` are neither read nor written.
struct KvPageCopyArgs {
  uint8_t* pages = nullptr;      // device: [num_tensors, num_pages, num_heads, page_size, row_bytes]
  uint8_t* canonical = nullptr;  // page-locked: [num_tensors, num_tokens, all_heads, row_bytes]; both 16-byte
                                 // aligned, row_bytes % 16 == 0
  int64_t num_tensors = 0, num_pages = 0, num_heads = 0, page_size = 0, row_bytes = 0;
  int64_t first_head = 0, all_heads = 0;
  int64_t page = 0, num_tokens = 0;
  bool to_device = false;

  // A row to copy; `head` counts from first_head on.
  struct Row {
    int64_t tensor = 0, token = 0, head = 0;
  };
  constexpr int64_t num_rows() const { return num_tensors * num_tokens * num_heads; }
  // Rows are numbered in the order of `canonical`.
  constexpr Row row(int64_t i) const {
    return {i / num_heads / num_tokens, i / num_heads % num_tokens, i % num_heads};
  }
  // The index of a row in `pages` and in `canonical`, in rows.
  constexpr int64_t index_in_pages(const Row& row) const {
    return ((row.tensor * num_pages + page) * num_heads + row.head) * page_size + row.token;
  }
  constexpr int64_t index_in_canonical(const Row& row) const {
    return (row.tensor * num_tokens + row.token) * all_heads + first_head + row.head;
  }
};

// The same copy of several pages.
struct KvPagesCopyArgs {
  static constexpr int kMostPages = 128;
  struct Page {
    int32_t page = 0, num_tokens = 0;
    int64_t offset = 0;  // bytes from each.canonical on, a multiple of 16
  };
  KvPageCopyArgs each;  // `page` and num_tokens are not used
  int num_pages = 0;
  Page pages[kMostPages];
};

// A copy of one slot of every layer with a state (StateCache) to another slot.
struct StateCopyArgs {
  float* layers = nullptr;                    // device: [num_layers, layer_elems]
  int64_t num_layers = 0, layer_elems = 0;    // a layer: the first parts of all slots, then the second ones
  int64_t first_elems = 0, second_elems = 0;  // of a slot's parts
  int64_t num_slots = 0, from = 0, to = 0;
};

// Each is one launch on the current stream. CopyFromHost starts to read host memory while preceding kernels
// are still running.
using CopyFromHost = void (*)(const CopyFromHostArgs&);
using CopyKvPages = void (*)(const KvPagesCopyArgs&);
using CopyState = void (*)(const StateCopyArgs&);
// All return null in a build without CUDA.
CopyFromHost cuda_copy_from_host();
CopyKvPages cuda_copy_kv_pages();
CopyState cuda_copy_state();

}  // namespace fp4moe
