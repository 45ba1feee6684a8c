// Sockets with which a test acts as a node or as an unknown client.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "engine/disagg/kv_handshake.h"
#include "engine/disagg/kv_listener.h"
#include "engine/disagg/kv_socket.h"

namespace fp4moe {

inline KvSocket::Clock::time_point in_seconds(double seconds) {
  return KvSocket::Clock::now() +
         std::chrono::duration_cast<KvSocket::Clock::duration>(std::chrono::duration<double>(seconds));
}

inline Result<std::unique_ptr<KvSocket>> connect_to(int port, KvSocketOptions options = {}) {
  return KvSocket::connect({"127.0.0.1", port}, /*only_loopback=*/true, std::move(options));
}

// Sends arbitrary bytes and detects when the other side ends the connection.
class Stranger {
 public:
  explicit Stranger(int port) : descriptor_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(descriptor_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  Stranger(Stranger&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  ~Stranger() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  // False if the connection has ended.
  bool send(std::string_view bytes) const {
    return ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == std::ssize(bytes);
  }
  bool send(const std::vector<uint8_t>& bytes) const {
    return send(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  // Whether the other side ends the connection within `seconds`; received bytes are discarded.
  bool is_ended_within(double seconds) const {
    const auto deadline = in_seconds(seconds);
    for (;;) {
      pollfd waits{descriptor_, POLLIN, 0};
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - KvSocket::Clock::now()).count();
      if (left <= 0 || ::poll(&waits, 1, static_cast<int>(left)) == 0) return false;
      char bytes[4096];
      if (::recv(descriptor_, bytes, sizeof bytes, 0) <= 0) return true;
    }
  }

 private:
  int descriptor_;
};

// Listens like a prefill node.
class TestPort {
 public:
  TestPort() {
    const Status status = listener_.listen("127.0.0.1", 0);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  int port() const { return listener_.port(); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port()); }
  std::unique_ptr<KvSocket> accept(KvSocketOptions options = {}) {
    const KvListener::Accepted accepted = listener_.accept();
    if (accepted.event != KvListener::Event::kConnection) return nullptr;
    return std::make_unique<KvSocket>(accepted.descriptor, std::move(options));
  }
  KvListener& listener() { return listener_; }

 private:
  KvListener listener_;
};

inline std::shared_ptr<const NodeSecret> secret_of(const std::string& text) {
  auto secret = NodeSecret::make({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  EXPECT_TRUE(secret.ok()) << secret.status().to_string();
  return std::make_shared<const NodeSecret>(std::move(*secret));
}

}  // namespace fp4moe
