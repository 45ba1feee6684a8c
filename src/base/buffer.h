// Owned, aligned, uninitialised memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/memory.h"
#include "fp4moe/status.h"

namespace fp4moe {

// At least 64-byte aligned bytes in one MemoryResource. Movable, not copyable.
class Buffer {
 public:
  Buffer() = default;
  // kDoesNotFit if the allocation fails; num_bytes == 0 makes an empty buffer.
  static Result<Buffer> make(int64_t num_bytes, MemoryResource& memory = host_memory());
  // A copy, in `memory`, of bytes in host memory.
  static Result<Buffer> copy_of(const void* host, int64_t num_bytes, MemoryResource& memory);
  static Result<Buffer> copy_of(std::span<const float> host, MemoryResource& memory) {
    return copy_of(host.data(), static_cast<int64_t>(host.size_bytes()), memory);
  }
  // A non-owning buffer over host memory, which must outlive it.
  static Buffer borrowed(uint8_t* data, int64_t num_bytes);
  ~Buffer() { release(); }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        num_bytes_(std::exchange(other.num_bytes_, 0)),
        memory_(std::exchange(other.memory_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(memory_, other.memory_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }

  uint8_t* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void release();
  uint8_t* data_ = nullptr;
  int64_t num_bytes_ = 0;
  MemoryResource* memory_ = nullptr;  // of data_; null: borrowed
};

// Bump allocator over one Buffer; reset() frees everything at once. Sizes are known at load, so exhaustion is
// a bug and fails a CHECK.
class Arena {
 public:
  Arena() = default;
  // Makes an arena with a capacity of padded(num_bytes).
  static Result<Arena> make(int64_t num_bytes, MemoryResource& memory = host_memory());
  // n elements of T, 64-byte aligned, uninitialised.
  template <class T>
  T* take(int64_t n) {
    return reinterpret_cast<T*>(take_bytes(n * static_cast<int64_t>(sizeof(T))));
  }
  void reset() { used_ = 0; }
  // Frees everything taken since used_bytes() was `used`.
  void rewind(int64_t used) { used_ = used; }
  int64_t used_bytes() const { return used_; }
  int64_t capacity_bytes() const { return buffer_.num_bytes(); }
  // Bytes that take() uses for num_bytes, including alignment.
  static constexpr int64_t padded(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

 private:
  uint8_t* take_bytes(int64_t num_bytes);
  Buffer buffer_;
  int64_t used_ = 0;
};

}  // namespace fp4moe
