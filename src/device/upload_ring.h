// UploadRing: host bytes on their way to the GPU. Pinned slots are filled by the caller's threads while the
// copy engine empties the others and kernels use what has arrived.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "device/event.h"
#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

// One thread at a time.
class UploadRing {
 public:
  static constexpr int kNumSlots = 3;
  struct Slot {
    uint8_t* host = nullptr;    // pinned, slot_bytes()
    uint8_t* device = nullptr;  // slot_bytes(), 256-byte aligned
  };

  // kDoesNotFit if host or GPU refuse the memory; kUnsupported without a device.
  static Result<UploadRing> make(int64_t slot_bytes);

  int64_t slot_bytes() const { return slot_bytes_; }
  // The slot to fill next, open until advance(); waits until what was sent from it before has been used.
  Result<Slot> next();
  // Starts the copy of that slot's first num_bytes to the device; work asked of stream() afterwards finds
  // them.
  void send(int64_t num_bytes);
  // All that uses the slot has been asked of stream(): next() may wait for it.
  void advance();
  // Waits for everything; the first error of it.
  Status finish() { return stream_.synchronize(); }
  Stream& stream() { return stream_; }

 private:
  struct SlotMemory {
    Buffer host, device;
    Event used;
    bool was_sent = false;
  };

  int64_t slot_bytes_ = 0;
  std::array<SlotMemory, kNumSlots> slots_;
  size_t current_ = 0;
  bool is_open_ = false;
  Stream stream_;
};

// While it lives, what this thread uploads goes through one ring: pinned memory is dear to make. Large
// uploads to device_memory() go through it too, the pool's threads filling the slots; so none may come from
// inside a loop of the pool.
class UploadScope {
 public:
  explicit UploadScope(ThreadPool& pool);
  ~UploadScope();
  UploadScope(const UploadScope&) = delete;
  UploadScope& operator=(const UploadScope&) = delete;

  // The innermost one of this thread, or null.
  static UploadScope* current();
  // `to` on the device = `from` on the host; done on return.
  Status upload(void* to, const void* from, int64_t num_bytes);

 private:
  friend Result<std::shared_ptr<UploadRing>> upload_ring(int64_t);
  ThreadPool& pool_;
  std::shared_ptr<UploadRing> ring_;  // made when it is wanted
  UploadScope* const outer_;
};

// A ring with slots of at least these bytes, all of it sent: the scope's, or one of the caller's own.
Result<std::shared_ptr<UploadRing>> upload_ring(int64_t slot_bytes);

}  // namespace fp4moe
