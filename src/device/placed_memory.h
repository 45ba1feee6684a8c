// PlacedMemory: gives the allocations of a load that is repeated the addresses that they had the first time,
// so that a recorded graph finds the new contents where it reads the old ones.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "base/memory.h"

namespace fp4moe {

// Usable by one thread at a time.
class PlacedMemory final : public MemoryResource {
 public:
  // `memory` must outlive this object, and this object its buffers.
  explicit PlacedMemory(MemoryResource& memory) : memory_(memory) {}
  ~PlacedMemory() override;
  PlacedMemory(const PlacedMemory&) = delete;
  PlacedMemory& operator=(const PlacedMemory&) = delete;

  // Ends the first load. The allocations that have not been released keep their places for good.
  void seal();
  // After seal(): the same sequence of allocations follows again. kInternal if one of them is still in use.
  Status restart();

  // kInternal after seal() if the load makes another sequence of allocations than the first time.
  Result<uint8_t*> allocate(int64_t num_bytes) override;
  // Frees memory that has no place.
  void release(uint8_t* data) override;
  Status upload(void* to, const void* from_host, int64_t num_bytes) override {
    return memory_.upload(to, from_host, num_bytes);
  }
  Status download(void* to_host, const void* from, int64_t num_bytes) override {
    return memory_.download(to_host, from, num_bytes);
  }
  bool is_host() const override { return memory_.is_host(); }

 private:
  struct Allocation {
    int64_t num_bytes = 0;
    uint8_t* place = nullptr;  // null: released before seal()
    bool in_use = false;       // of an allocation with a place
  };

  MemoryResource& memory_;
  std::vector<Allocation> allocations_;  // in the order of the first load
  std::unordered_map<uint8_t*, size_t> places_;
  size_t next_ = 0;  // after seal()
  bool is_sealed_ = false;
};

// Thread-local: during the scope's lifetime device_memory() on this thread is `memory`; null: as without it.
class DeviceMemoryScope {
 public:
  explicit DeviceMemoryScope(MemoryResource* memory);
  ~DeviceMemoryScope();
  DeviceMemoryScope(const DeviceMemoryScope&) = delete;
  DeviceMemoryScope& operator=(const DeviceMemoryScope&) = delete;

  // Returns the memory of this thread's innermost scope, or null.
  static MemoryResource* current();

 private:
  MemoryResource* const outer_;
};

}  // namespace fp4moe
