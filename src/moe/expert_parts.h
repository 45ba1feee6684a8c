// The bytes of one packed expert: parts in memory, one after the other.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fp4moe {

struct ExpertPart {
  uint8_t* data = nullptr;
  int64_t num_bytes = 0;
};

// Calls copy(address, offset, count) for the pieces of an expert's bytes [first, first + num_bytes), in
// order: `count` bytes in memory from `address` on, which begin `offset` bytes behind the first.
template <class Parts, class Copy>
void for_expert_pieces(const Parts& parts, int64_t first, int64_t num_bytes, const Copy& copy) {
  int64_t begin = 0;  // of the part
  for (const ExpertPart& part : parts) {
    const int64_t from = std::max(first, begin), to = std::min(first + num_bytes, begin + part.num_bytes);
    if (from < to) copy(part.data + (from - begin), from - first, to - from);
    begin += part.num_bytes;
  }
}

}  // namespace fp4moe
