// Arrays in GPU memory for tests, between canaries.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/buffer.h"
#include "device/device_memory.h"

namespace fp4moe {

// Returns `size` values with all bits set: NaN as f32, bf16 and e4m3, -1 as an integer.
template <class T>
std::vector<T> poisoned(int64_t size) {
  std::vector<T> values(static_cast<size_t>(size));
  if (size > 0) std::memset(static_cast<void*>(values.data()), 0xff, values.size() * sizeof(T));
  return values;
}

// Holds `values` or `size` poisoned values; the destructor detects writes past either end.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t size) : DeviceArray(poisoned<T>(size)) {}
  explicit DeviceArray(const std::vector<T>& values) : bytes_(values.size() * sizeof(T)) {
    std::vector<uint8_t> all(bytes_ + 2 * kCanary, kFill);
    if (bytes_ > 0) std::memcpy(all.data() + kCanary, values.data(), bytes_);
    memory_ = Buffer::copy_of(all.data(), static_cast<int64_t>(all.size()), device_memory()).value();
  }
  ~DeviceArray() {
    const std::vector<uint8_t> all = bytes();
    for (size_t i = 0; i < kCanary; ++i)
      if (all[i] != kFill || all[all.size() - 1 - i] != kFill) {
        ADD_FAILURE() << "a write outside the array of " << bytes_ << " bytes";
        return;
      }
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data() + kCanary); }
  std::vector<T> values() const {
    const std::vector<uint8_t> all = bytes();
    std::vector<T> values(bytes_ / sizeof(T));
    if (bytes_ > 0) std::memcpy(values.data(), all.data() + kCanary, bytes_);
    return values;
  }

 private:
  static constexpr size_t kCanary = 1024;
  static constexpr uint8_t kFill = 0xee;
  std::vector<uint8_t> bytes() const {
    std::vector<uint8_t> all(bytes_ + 2 * kCanary);
    EXPECT_TRUE(device_memory().download(all.data(), memory_.data(), static_cast<int64_t>(all.size())).ok());
    return all;
  }

  size_t bytes_;
  Buffer memory_;
};

}  // namespace fp4moe
