#include "base/buffer.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;

class HostMemory final : public MemoryResource {
 public:
  Result<uint8_t*> allocate(int64_t num_bytes) override {
    const int64_t align = num_bytes >= 2 * kHugePageBytes ? kHugePageBytes : 64;
    if (num_bytes > INT64_MAX - align)
      return does_not_fit("buffer of " + std::to_string(num_bytes) + " bytes is too large");
    const int64_t rounded = (num_bytes + align - 1) / align * align;
    void* p = std::aligned_alloc(static_cast<size_t>(align), static_cast<size_t>(rounded));
    if (p == nullptr) return does_not_fit("cannot allocate " + std::to_string(num_bytes) + " bytes");
    if (align == kHugePageBytes) madvise(p, static_cast<size_t>(rounded), MADV_HUGEPAGE);  // best effort
    return static_cast<uint8_t*>(p);
  }
  void release(uint8_t* data) override { std::free(data); }
  Status upload(void* to, const void* from_host, int64_t num_bytes) override {
    std::memcpy(to, from_host, static_cast<size_t>(num_bytes));
    return {};
  }
  Status download(void* to_host, const void* from, int64_t num_bytes) override {
    return upload(to_host, from, num_bytes);
  }
  bool is_host() const override { return true; }
};

}  // namespace

MemoryResource& host_memory() {
  static HostMemory memory;
  return memory;
}

Result<Buffer> Buffer::make(int64_t num_bytes, MemoryResource& memory) {
  if (num_bytes < 0) return invalid_argument("a buffer cannot have " + std::to_string(num_bytes) + " bytes");
  Buffer buffer;
  if (num_bytes == 0) return buffer;
  FP4MOE_ASSIGN_OR_RETURN(buffer.data_, memory.allocate(num_bytes));
  buffer.num_bytes_ = num_bytes;
  buffer.memory_ = &memory;
  return buffer;
}

Result<Buffer> Buffer::copy_of(const void* host, int64_t num_bytes, MemoryResource& memory) {
  FP4MOE_ASSIGN_OR_RETURN(Buffer buffer, make(num_bytes, memory));
  if (num_bytes > 0) FP4MOE_RETURN_IF_ERROR(memory.upload(buffer.data(), host, num_bytes));
  return buffer;
}

Buffer Buffer::borrowed(uint8_t* data, int64_t num_bytes) {
  Buffer buffer;
  buffer.data_ = data;
  buffer.num_bytes_ = num_bytes;
  return buffer;
}

void Buffer::release() {
  if (memory_ != nullptr) memory_->release(data_);
  memory_ = nullptr;
  data_ = nullptr;
  num_bytes_ = 0;
}

Result<Arena> Arena::make(int64_t num_bytes, MemoryResource& memory) {
  if (num_bytes > INT64_MAX - 64)
    return does_not_fit("arena of " + std::to_string(num_bytes) + " bytes is too large");
  FP4MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::make(padded(num_bytes), memory));
  Arena arena;
  arena.buffer_ = std::move(buffer);
  return arena;
}

uint8_t* Arena::take_bytes(int64_t num_bytes) {
  FP4MOE_CHECK(num_bytes >= 0 && num_bytes <= capacity_bytes() - used_,
               "arena: want " + std::to_string(num_bytes) + " bytes, " +
                   std::to_string(capacity_bytes() - used_) + " of " + std::to_string(capacity_bytes()) +
                   " left");
  uint8_t* p = buffer_.data() + used_;
  used_ += padded(num_bytes);
  return p;
}

}  // namespace fp4moe
