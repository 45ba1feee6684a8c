// MessagePipe: a queue of messages of any size from one rank of a job to another one. A message travels in
// pieces through two slots in the receiver's heap, so a sender runs ahead of the receiver by up to two
// pieces.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/endpoint.h"

namespace fp4moe {

// The same at both ends.
struct PipePlace {
  int sender = 0, receiver = 0;       // ranks
  int data_slot = 0, taken_slot = 0;  // signal slots (comm/endpoint.h), from the sender and from the receiver
  int64_t offset = 0;                 // of kPipeBytes bytes in the receiver's heap; a multiple of 64
};
constexpr int64_t kPipePieceBytes = 256 << 10;
constexpr int64_t kPipeBytes = 2 * (64 + kPipePieceBytes);

class MessagePipe {
 public:
  // One end: `endpoint` is that of the place's sender or receiver. first_signal: the job's first signal
  // value.
  MessagePipe(Endpoint& endpoint, const PipePlace& place, uint32_t first_signal = 0)
      : endpoint_(&endpoint), place_(place), piece_(first_signal) {}

  // The sender's thread: queues a message. Waits for the receiver at most `timeout`, or returns the job's
  // failure.
  Status send(std::span<const uint8_t> message, std::chrono::nanoseconds timeout);
  // The receiver's thread: waits at most `timeout` for the next message. kDataLoss: it has more than
  // max_bytes.
  Status receive(int64_t max_bytes, std::chrono::nanoseconds timeout, std::vector<uint8_t>& message);

 private:
  Status wait_for(int peer, int slot, uint32_t value, std::chrono::nanoseconds timeout);
  int64_t slot_offset() const { return place_.offset + piece_ % 2 * (kPipeBytes / 2); }

  Endpoint* endpoint_;
  PipePlace place_;
  uint32_t piece_;  // first_signal plus the pieces sent or received so far
};

}  // namespace fp4moe
