#include "device/upload_ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "device/device_memory.h"
#include "device/pinned_memory.h"

namespace fp4moe {
namespace {

constexpr int64_t kScopeSlotBytes = int64_t{32} << 20;
constexpr int64_t kBytesPerChunk = int64_t{1} << 20;  // bytes that one thread copies at a time

thread_local UploadScope* t_scope = nullptr;

}  // namespace

Result<UploadRing> UploadRing::make(int64_t slot_bytes) {
  UploadRing ring;
  ring.slot_bytes_ = slot_bytes;
  FP4MOE_ASSIGN_OR_RETURN(ring.stream_, Stream::make());
  for (SlotMemory& slot : ring.slots_) {
    FP4MOE_ASSIGN_OR_RETURN(slot.host, Buffer::make(slot_bytes, pinned_memory()));
    FP4MOE_ASSIGN_OR_RETURN(slot.device, Buffer::make(slot_bytes, device_memory()));
    FP4MOE_ASSIGN_OR_RETURN(slot.used, Event::make());
  }
  return ring;
}

Result<UploadRing::Slot> UploadRing::next() {
  FP4MOE_CHECK(!is_open_, "a slot is already being filled");
  const SlotMemory& slot = slots_[current_];
  if (slot.was_sent) FP4MOE_RETURN_IF_ERROR(slot.used.synchronize());
  is_open_ = true;
  return Slot{slot.host.data(), slot.device.data()};
}

void UploadRing::send(int64_t num_bytes) {
  const StreamScope scope(stream_);
  copy_async(slots_[current_].device.data(), slots_[current_].host.data(), num_bytes);
}

void UploadRing::advance() {
  slots_[current_].used.record(stream_);
  slots_[current_].was_sent = true;
  current_ = (current_ + 1) % kNumSlots;
  is_open_ = false;
}

UploadScope::UploadScope(ThreadPool& pool) : pool_(pool), outer_(std::exchange(t_scope, this)) {}
UploadScope::~UploadScope() { t_scope = outer_; }
UploadScope* UploadScope::current() { return t_scope; }

Status UploadScope::upload(void* to, const void* from, int64_t num_bytes) {
  FP4MOE_ASSIGN_OR_RETURN(const std::shared_ptr<UploadRing> ring, upload_ring(kScopeSlotBytes));
  const auto* source = static_cast<const uint8_t*>(from);
  const StreamScope scope(ring->stream());
  for (int64_t done = 0; done < num_bytes; done += ring->slot_bytes()) {
    const int64_t part = std::min(ring->slot_bytes(), num_bytes - done);
    FP4MOE_ASSIGN_OR_RETURN(const UploadRing::Slot slot, ring->next());
    pool_.run((part + kBytesPerChunk - 1) / kBytesPerChunk, [&](int64_t chunk, int) {
      const int64_t first = chunk * kBytesPerChunk;
      std::memcpy(slot.host + first, source + done + first,
                  static_cast<size_t>(std::min(kBytesPerChunk, part - first)));
    });
    copy_async(static_cast<uint8_t*>(to) + done, slot.host, part);
    ring->advance();
  }
  return ring->finish();
}

Result<std::shared_ptr<UploadRing>> upload_ring(int64_t slot_bytes) {
  UploadScope* scope = UploadScope::current();
  if (scope != nullptr && scope->ring_ != nullptr && scope->ring_->slot_bytes() >= slot_bytes)
    return scope->ring_;
  if (scope != nullptr) scope->ring_.reset();  // free the old ring before allocating a larger one
  FP4MOE_ASSIGN_OR_RETURN(UploadRing made, UploadRing::make(slot_bytes));
  auto ring = std::make_shared<UploadRing>(std::move(made));
  if (scope != nullptr) scope->ring_ = ring;
  return ring;
}

}  // namespace fp4moe
