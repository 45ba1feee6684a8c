// KvSocket: a TCP connection between two nodes that carries whole frames (engine/kv_wire.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/byte_budget.h"
#include "engine/kv_wire.h"
#include "engine/node_address.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct KvFrame {
  KvFrameHeader header;
  std::vector<uint8_t> payload;
  ByteBudget::Lease lease;  // for the payload's memory
};

struct KvSocketOptions {
  // Seconds that a frame may take from its first byte on, to be received or sent, beside one second for each
  // kKvBytesPerSecond that have been. So a peer that drips bytes is cut off after about that long, and a
  // large page over a slow network is not.
  double timeout_seconds = 10;
  std::shared_ptr<ByteBudget> budget;  // of received payloads over 1 MiB but pages; null: unlimited
};
constexpr double kKvBytesPerSecond = 256 << 10;

// One thread sends, another one receives, any may shut down. A peer that has died, that sends or takes a
// frame too slowly, or whose machine does not answer any more ends every call with kUnavailable.
class KvSocket {
 public:
  using Clock = std::chrono::steady_clock;
  KvSocket(int descriptor, KvSocketOptions options);  // takes the descriptor over
  ~KvSocket();
  KvSocket(const KvSocket&) = delete;
  KvSocket& operator=(const KvSocket&) = delete;
  // At most 5 s, and at most options.timeout_seconds, for each address of the host. only_loopback: its other
  // addresses are refused. kUnavailable, or kInvalidArgument for a host without a legal address.
  static Result<std::unique_ptr<KvSocket>> connect(const NodeAddress& address, bool only_loopback,
                                                   KvSocketOptions options);

  Status send(std::span<const uint8_t> frame);
  // The next frame, checked. Waits for its first byte as long as it takes, then until the frame's deadline;
  // for neither beyond end_by. Memory grows with the bytes that arrive, not with what the header promises.
  Result<KvFrame> receive(const KvLegal& legal, Clock::time_point end_by = Clock::time_point::max());
  void shut_down();
  std::string peer() const;  // "address:port" of the other side

 private:
  struct Progress;
  Status wait(short events, Clock::time_point deadline) const;
  Status read_all(std::span<uint8_t> bytes, Progress& progress);

  const int descriptor_;
  const KvSocketOptions options_;
};

}  // namespace fp4moe
