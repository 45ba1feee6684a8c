// DeviceContext: this process's state for one GPU. DeviceScope: sets the calling thread's current GPU, on
// which the thread makes its streams, events and memory.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "base/memory.h"
#include "device/device_info.h"
#include "device/kernel_set.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Uses of cuBLASLt, each with its own handle: DenseOps::linear and DevicePeakOps::matmul.
enum class DeviceLibrary : uint8_t { kLinear, kPeakMatmul };

class DeviceContext {
 public:
  // Returns the context of GPU `ordinal`, which the first call makes and which exists until the process ends.
  // Thread-safe. Fails as device_info() does, or with the driver's error if the GPU cannot be selected.
  static Result<DeviceContext*> of(int ordinal);
  // Returns the context of the thread's innermost DeviceScope, or null if there is none.
  static DeviceContext* current();

  int ordinal() const { return ordinal_; }
  const DeviceInfo& info() const { return info_; }
  MemoryResource& memory() { return *memory_; }  // device_memory() of this GPU
  KernelSet& prepared_kernels() { return prepared_kernels_; }

  // Returns the state that `library` keeps for this GPU. The first call default-constructs a T and calls its
  // `Status open()`; if that fails, every call returns the error. Thread-safe. Precondition: this GPU is
  // current.
  template <class T>
  Result<T*> open_library(DeviceLibrary library) {
    OpenLibrary& slot = libraries_[static_cast<size_t>(library)];
    std::call_once(slot.once, [&] {
      const auto state = std::make_shared<T>();
      static_cast<void>(slot.status = state->open());  // void: nvcc warns that the result is unused
      slot.state = state;
    });
    if (!slot.status.ok()) return slot.status;
    return static_cast<T*>(slot.state.get());
  }

 private:
  struct OpenLibrary {
    std::once_flag once;
    Status status;
    std::shared_ptr<void> state;
  };
  DeviceContext(int ordinal, DeviceInfo info);

  const int ordinal_;
  const DeviceInfo info_;
  const std::unique_ptr<MemoryResource> memory_;
  KernelSet prepared_kernels_;
  std::array<OpenLibrary, 2> libraries_;
};

// Returns the thread's current GPU. Precondition: this thread has a DeviceScope or a StreamScope.
DeviceContext& current_device();
// Returns the error (kUnsupported) for calls that need a current GPU in a thread without one.
Status no_current_device();

// Thread-local: makes `device` the calling thread's current GPU during the scope's lifetime.
class DeviceScope {
 public:
  explicit DeviceScope(DeviceContext& device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  DeviceContext* const outer_;
};

}  // namespace fp4moe
