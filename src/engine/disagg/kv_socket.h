// KvSocket: a TCP connection between two nodes that carries whole frames (engine/disagg/kv_wire.h).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/disagg/byte_budget.h"
#include "engine/disagg/kv_wire.h"
#include "engine/disagg/node_address.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct KvFrame {
  KvFrameHeader header;
  std::vector<uint8_t> payload;
  ByteBudget::Lease lease;  // the payload's share of KvSocketOptions::budget
};

struct KvSocketOptions {
  // Time limit in seconds for sending or receiving one frame, extended by one second per kKvBytesPerSecond
  // transferred; also the longest pause between bytes. A peer that sends only a few bytes at a time is cut
  // off after about this time, while a large page can take longer on a slow network.
  double timeout_seconds = 10;
  std::shared_ptr<ByteBudget> budget;  // for received payloads over 1 MiB, except pages; null: no limit
};
constexpr double kKvBytesPerSecond = 256 << 10;

// One thread sends, another receives, and any thread may shut down. Every call returns kUnavailable if the
// peer has died, is unreachable, or sends or receives a frame too slowly.
class KvSocket {
 public:
  using Clock = std::chrono::steady_clock;
  KvSocket(int descriptor, KvSocketOptions options);  // takes ownership of the descriptor
  ~KvSocket();
  KvSocket(const KvSocket&) = delete;
  KvSocket& operator=(const KvSocket&) = delete;
  // Tries each address of the host, each for at most 5 s and at most options.timeout_seconds. only_loopback:
  // skips other addresses. kUnavailable, or kInvalidArgument if the host has no permitted address.
  static Result<std::unique_ptr<KvSocket>> connect(const NodeAddress& address, bool only_loopback,
                                                   KvSocketOptions options);

  Status send(std::span<const uint8_t> frame);
  // Receives and verifies the next frame. Waits without limit for its first byte, then until the frame's
  // deadline; neither wait extends beyond end_by. Memory grows with the bytes received, not with the length
  // in the header.
  Result<KvFrame> receive(const KvLegal& legal, Clock::time_point end_by = Clock::time_point::max());
  // Gives the memory of a received payload back, for those of later pages. Call on receive()'s thread.
  void reuse(std::vector<uint8_t> payload) { spare_.push_back(std::move(payload)); }
  void shut_down();
  std::string peer() const;  // "address:port" of the other node

 private:
  struct Progress;
  Status wait(short events, Clock::time_point deadline) const;
  Status wait_for_bytes(size_t num_bytes, Clock::time_point deadline);
  void wake_at(size_t num_bytes);
  Status read_all(std::span<uint8_t> bytes, Progress& progress);

  const int descriptor_;
  const KvSocketOptions options_;
  std::vector<std::vector<uint8_t>> spare_;  // reuse()
  // The next frame's header, or its first bytes, which have been received together with a payload.
  std::array<uint8_t, sizeof(KvFrameHeader)> ahead_;
  size_t num_ahead_ = 0;
  int wakes_at_ = 1;  // bytes that have to arrive until a wait for them ends
};

}  // namespace fp4moe
