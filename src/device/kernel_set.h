// KernelSet: the kernels that have been prepared on one GPU. The driver keeps a kernel's attributes per
// device, and setting them before each launch would take several microseconds of host time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/check.h"

namespace fp4moe {

class KernelSet {
 public:
  static constexpr size_t kMaxKernels = 255;

  // Calls prepare() unless an earlier call for `kernel` has returned. Thread-safe; later calls take no lock.
  template <class Prepare>
  void once(const void* kernel, const Prepare& prepare) {
    if (slot_of(kernel).load(std::memory_order_acquire) == kernel) return;
    const std::lock_guard lock(mutex_);
    std::atomic<const void*>& slot = slot_of(kernel);
    if (slot.load(std::memory_order_relaxed) == kernel) return;
    FP4MOE_CHECK(num_kernels_ < kMaxKernels, std::to_string(kMaxKernels) + " kernels have been prepared");
    prepare();
    ++num_kernels_;
    slot.store(kernel, std::memory_order_release);
  }

 private:
  // Returns the slot of the hash table that holds `kernel`, or else the empty slot that it would take. One
  // slot always stays empty.
  std::atomic<const void*>& slot_of(const void* kernel) {
    constexpr uintptr_t kAlignment = 16;  // of function addresses
    for (size_t i = reinterpret_cast<uintptr_t>(kernel) / kAlignment % slots_.size();;
         i = (i + 1) % slots_.size()) {
      const void* const found = slots_[i].load(std::memory_order_acquire);
      if (found == kernel || found == nullptr) return slots_[i];
    }
  }

  std::array<std::atomic<const void*>, kMaxKernels + 1> slots_{};
  std::mutex mutex_;
  size_t num_kernels_ = 0;  // guarded by mutex_
};

}  // namespace fp4moe
