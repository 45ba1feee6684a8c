// GPU memory for kernel tests: NaN until written, with detection of writes outside it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/buffer.h"
#include "device/device_memory.h"

namespace fp4moe {

constexpr uint8_t kNanByte = 0xff;  // repeated: NaN as f32 and bf16, -1 as an integer

// Device memory between canaries, which values() checks.
class Guarded {
 public:
  // Fills `bytes` bytes with `fill`.
  explicit Guarded(int64_t bytes, uint8_t fill = kNanByte) : bytes_(bytes) {
    std::vector<uint8_t> host(static_cast<size_t>(bytes + 2 * kGuard), kCanary);
    std::fill_n(host.begin() + kGuard, bytes, fill);
    buffer_ = Buffer::make(bytes + 2 * kGuard, device_memory()).value();
    EXPECT_TRUE(device_memory().upload(buffer_.data(), host.data(), bytes + 2 * kGuard).ok());
  }
  template <class T>
  explicit Guarded(const std::vector<T>& values) : Guarded(static_cast<int64_t>(values.size() * sizeof(T))) {
    if (values.empty()) return;
    EXPECT_TRUE(device_memory().upload(data(), values.data(), bytes_).ok());
  }
  uint8_t* data() const { return buffer_.data() + kGuard; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  void fill(int64_t first, int64_t count, uint8_t value) {
    const std::vector<uint8_t> host(static_cast<size_t>(count), value);
    EXPECT_TRUE(device_memory().upload(data() + first, host.data(), count).ok());
  }
  template <class T>
  std::vector<T> values() const {
    std::vector<uint8_t> host(static_cast<size_t>(bytes_ + 2 * kGuard));
    EXPECT_TRUE(device_memory().download(host.data(), buffer_.data(), bytes_ + 2 * kGuard).ok());
    for (int64_t i = 0; i < kGuard; ++i)
      if (host[static_cast<size_t>(i)] != kCanary ||
          host[static_cast<size_t>(bytes_ + kGuard + i)] != kCanary) {
        ADD_FAILURE() << "a canary was overwritten";
        break;
      }
    std::vector<T> result(static_cast<size_t>(bytes_) / sizeof(T));
    std::memcpy(result.data(), host.data() + kGuard, static_cast<size_t>(bytes_));
    return result;
  }

 private:
  static constexpr int64_t kGuard = 256;  // bytes on each side
  static constexpr uint8_t kCanary = 0x5a;

  int64_t bytes_;
  Buffer buffer_;
};

}  // namespace fp4moe
