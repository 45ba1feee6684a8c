#include "device/placed_memory.h"

#include <string>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

thread_local MemoryResource* t_placed = nullptr;

}  // namespace

PlacedMemory::~PlacedMemory() {
  for (const auto& [place, index] : places_) memory_.release(place);
}

void PlacedMemory::seal() { is_sealed_ = true; }

Status PlacedMemory::restart() {
  FP4MOE_CHECK(is_sealed_, "restart() before seal()");
  for (size_t i = 0; i < allocations_.size(); ++i)
    if (allocations_[i].in_use)
      return internal_error("allocation " + std::to_string(i) + " of " + std::to_string(allocations_.size()) +
                            " (" + std::to_string(allocations_[i].num_bytes) + " bytes) is still in use");
  next_ = 0;
  return {};
}

Result<uint8_t*> PlacedMemory::allocate(int64_t num_bytes) {
  if (!is_sealed_) {
    FP4MOE_ASSIGN_OR_RETURN(uint8_t* const data, memory_.allocate(num_bytes));
    places_.emplace(data, allocations_.size());
    allocations_.push_back({num_bytes, data, true});
    return data;
  }
  if (next_ == allocations_.size() || allocations_[next_].num_bytes != num_bytes)
    return internal_error("allocation " + std::to_string(next_) + " has " + std::to_string(num_bytes) +
                          " bytes; in the first load " +
                          (next_ == allocations_.size()
                               ? "there were " + std::to_string(next_) + " allocations"
                               : "it had " + std::to_string(allocations_[next_].num_bytes) + " bytes"));
  Allocation& allocation = allocations_[next_++];
  if (allocation.place == nullptr) return memory_.allocate(num_bytes);
  allocation.in_use = true;
  return allocation.place;
}

void PlacedMemory::release(uint8_t* data) {
  const auto at = places_.find(data);
  if (at != places_.end()) allocations_[at->second].in_use = false;
  if (at != places_.end() && is_sealed_) return;
  if (at != places_.end()) {
    allocations_[at->second].place = nullptr;
    places_.erase(at);
  }
  memory_.release(data);
}

DeviceMemoryScope::DeviceMemoryScope(MemoryResource* memory) : outer_(std::exchange(t_placed, memory)) {}
DeviceMemoryScope::~DeviceMemoryScope() { t_placed = outer_; }
MemoryResource* DeviceMemoryScope::current() { return t_placed; }

}  // namespace fp4moe
