// UploadRing: pipelined uploads to the GPU. The caller's threads fill one pinned slot while the copy engine
// transfers another and kernels use the data that has arrived.
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

// Usable by one thread at a time.
class UploadRing {
 public:
  static constexpr int kNumSlots = 3;
  struct Slot {
    uint8_t* host = nullptr;    // pinned, slot_bytes()
    uint8_t* device = nullptr;  // slot_bytes(), 256-byte aligned
  };

  // Makes a ring. kDoesNotFit if host or GPU memory is too small; kUnsupported without a device.
  static Result<UploadRing> make(int64_t slot_bytes);

  int64_t slot_bytes() const { return slot_bytes_; }
  // Opens the next slot for filling, until advance(); first waits for all earlier work that uses the slot.
  Result<Slot> next();
  // Enqueues the copy of the open slot's first num_bytes to the device on stream().
  void send(int64_t num_bytes);
  // Closes the slot. Call once all work that uses the slot has been enqueued on stream().
  void advance();
  // Waits for all work; returns the first error.
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

// Thread-local: during the scope's lifetime this thread's uploads share one ring, because pinning memory is
// expensive. Uploads of 4 MiB or more to device_memory() use it too, and the pool's threads fill its slots,
// so such uploads must not be started from inside a loop of the pool.
class UploadScope {
 public:
  explicit UploadScope(ThreadPool& pool);
  ~UploadScope();
  UploadScope(const UploadScope&) = delete;
  UploadScope& operator=(const UploadScope&) = delete;

  // Returns the innermost scope of this thread, or null.
  static UploadScope* current();
  // Copies `from` in host memory to `to` on the device; complete on return.
  Status upload(void* to, const void* from, int64_t num_bytes);

 private:
  friend Result<std::shared_ptr<UploadRing>> upload_ring(int64_t);
  ThreadPool& pool_;
  std::shared_ptr<UploadRing> ring_;  // made on first use
  UploadScope* const outer_;
};

// Returns a ring with slots of at least slot_bytes: that of the thread's UploadScope or, without a scope, a
// new one.
Result<std::shared_ptr<UploadRing>> upload_ring(int64_t slot_bytes);

}  // namespace fp4moe
