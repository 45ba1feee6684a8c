// KvSocket: a TCP connection between two nodes that carries whole frames (engine/kv_wire.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/kv_wire.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct KvFrame {
  KvFrameHeader header;
  std::vector<uint8_t> payload;
};

// One thread sends, another one receives, any may shut down. A peer that has died, or whose machine does not
// answer any more, ends every call with kUnavailable.
class KvSocket {
 public:
  explicit KvSocket(int descriptor);  // takes it over
  ~KvSocket();
  KvSocket(const KvSocket&) = delete;
  KvSocket& operator=(const KvSocket&) = delete;
  // kUnavailable, or kInvalidArgument for what is no host.
  static Result<std::unique_ptr<KvSocket>> connect(const std::string& host, int port, double timeout_seconds);

  Status send(std::span<const uint8_t> frame);
  // The next frame of this epoch, checked. Waits as long as it takes.
  Result<KvFrame> receive(uint64_t epoch, int64_t max_page_bytes);
  // The same, but for at most so many seconds until its end.
  Result<KvFrame> receive_within(double seconds, uint64_t epoch, int64_t max_page_bytes);
  void shut_down();
  std::string peer() const;  // "address:port" of the other side

 private:
  Status read_all(std::span<uint8_t> bytes);

  const int descriptor_;
};

// A port to connect to.
class KvListener {
 public:
  KvListener() = default;
  ~KvListener();
  KvListener(const KvListener&) = delete;
  KvListener& operator=(const KvListener&) = delete;
  // Port 0: any. kInvalidArgument for no address of this machine, kUnavailable if the port is taken.
  Status listen(const std::string& host, int port);
  int port() const { return port_; }
  // Null after shut_down().
  std::unique_ptr<KvSocket> accept();
  void shut_down();

 private:
  int descriptor_ = -1, port_ = 0;
  std::atomic<bool> ended_ = false;
};

}  // namespace fp4moe
