#include "engine/ranks/message_pipe.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"
#include "base/seconds.h"

namespace fp4moe {

// A slot has the number of bytes of the message from this piece on, then the piece at byte 64. Piece n may
// overwrite piece n - 2 once the receiver has signalled that it has taken it.
Status MessagePipe::send(std::span<const uint8_t> message, std::chrono::nanoseconds timeout) {
  const auto num_bytes = static_cast<int64_t>(message.size());
  int64_t at = 0;
  do {
    FP4MOE_RETURN_IF_ERROR(wait_for(place_.receiver, place_.taken_slot, piece_ - 1, timeout));
    const int64_t left = num_bytes - at, length = std::min(left, kPipePieceBytes);
    FP4MOE_RETURN_IF_ERROR(endpoint_->put(place_.receiver, slot_offset(), &left, sizeof left));
    FP4MOE_RETURN_IF_ERROR(endpoint_->put(place_.receiver, slot_offset() + 64, message.data() + at, length));
    FP4MOE_RETURN_IF_ERROR(endpoint_->signal(place_.receiver, place_.data_slot, ++piece_));
    at += length;
  } while (at < num_bytes);
  return {};
}

Status MessagePipe::receive(int64_t max_bytes, std::chrono::nanoseconds timeout,
                            std::vector<uint8_t>& message) {
  message.clear();
  for (bool is_first = true;; is_first = false) {
    FP4MOE_RETURN_IF_ERROR(wait_for(place_.sender, place_.data_slot, piece_ + 1, timeout));
    const uint8_t* const slot = endpoint_->heap() + slot_offset();
    int64_t left = 0;
    std::memcpy(&left, slot, sizeof left);
    if (left < (is_first ? 0 : 1) || left > max_bytes - static_cast<int64_t>(message.size()))
      return data_loss("rank " + std::to_string(place_.sender) + " sends a message with " +
                       std::to_string(left) + " more bytes after " + std::to_string(message.size()) +
                       "; legal: at most " + std::to_string(max_bytes));
    const int64_t length = std::min(left, kPipePieceBytes);
    message.insert(message.end(), slot + 64, slot + 64 + length);
    FP4MOE_RETURN_IF_ERROR(endpoint_->signal(place_.sender, place_.taken_slot, ++piece_));
    if (left == length) return {};
  }
}

Status MessagePipe::wait_for(int peer, int slot, uint32_t value, std::chrono::nanoseconds timeout) {
  uint32_t seen = 0;
  const Status status = endpoint_->wait(peer, slot, value, timeout, &seen);
  if (status.ok() || !endpoint_->failure().ok()) return status;
  return {status.code(), "rank " + std::to_string(endpoint_->rank()) + " waited " +
                             seconds_text(std::chrono::duration<double>(timeout).count()) + " for rank " +
                             std::to_string(peer) + ", which did not " +
                             (peer == place_.receiver ? "take" : "send") + " a message"};
}

}  // namespace fp4moe
