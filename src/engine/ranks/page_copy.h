// PageRead, PageWrite: KV pages to copy to or from memory.
#pragma once

#include <cstdint>
#include <span>

#include "model/kv_window.h"

namespace fp4moe {

// A page's first num_tokens tokens, and the memory of their canonical form.
template <class Byte>
struct PageBytes {
  PageId page;
  int64_t num_tokens = 0;
  std::span<Byte> canonical;
};
using PageRead = PageBytes<uint8_t>;
using PageWrite = PageBytes<const uint8_t>;

}  // namespace fp4moe
