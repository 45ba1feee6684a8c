#include "device/upload_ring.h"

#include "base/check.h"
#include "device/device_memory.h"
#include "device/pinned_memory.h"

namespace fp4moe {

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
  const SlotMemory& slot = slots_[current_];
  if (slot.was_sent) FP4MOE_RETURN_IF_ERROR(slot.used.synchronize());
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
}

}  // namespace fp4moe
