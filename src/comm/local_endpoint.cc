#include "comm/local_endpoint.h"

#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {

void LocalEndpoint::check_put(int dst, int64_t offset, int64_t num_bytes) const {
  FP4MOE_CHECK(dst >= 0 && dst < size(),
               "put to rank " + std::to_string(dst) + " of " + std::to_string(size()));
  FP4MOE_CHECK(offset >= 0 && num_bytes >= 0 && offset <= heap_bytes() && num_bytes <= heap_bytes() - offset,
               "put of " + std::to_string(num_bytes) + " bytes at " + std::to_string(offset) +
                   " of a heap of " + std::to_string(heap_bytes()));
}

void LocalEndpoint::check_signal(int dst, int slot) const {
  FP4MOE_CHECK(dst >= 0 && dst < size() && slot >= 0 && slot < kSignalSlots,
               "signal to rank " + std::to_string(dst) + " of " + std::to_string(size()) + ", slot " +
                   std::to_string(slot));
}

Status LocalEndpoint::put(int dst, int64_t offset, const void* src, int64_t num_bytes) {
  check_put(dst, offset, num_bytes);
  if (memory_.failed()) return memory_.failure();
  if (num_bytes > 0) std::memcpy(memory_.heap(dst) + offset, src, static_cast<size_t>(num_bytes));
  return {};
}

Status LocalEndpoint::signal(int dst, int slot, uint32_t value) {
  check_signal(dst, slot);
  if (memory_.failed()) return memory_.failure();
  memory_.raise(rank_, dst, slot, value);
  return {};
}

}  // namespace fp4moe
