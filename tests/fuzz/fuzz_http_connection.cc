// Sends any bytes in pieces on a live connection to a server with a fake engine. The server responds or
// closes, stays within its memory budget, releases the client's memory when the client disconnects, and still
// serves /health and /metrics.
//
// Input: the size of the pieces (0: all at once), a seed for the cuts, then the bytes.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "fp4moe/server.h"
#include "server/fake_engine.h"

namespace {

using namespace fp4moe;

constexpr int64_t kMaxBuffered = 1 << 20;
constexpr int kMostMilliseconds = 10000;  // far more than any response takes, even under a sanitizer

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "the server %s\n", what);
  __builtin_trap();
}

struct LiveServer {
  LiveServer() : engine({.special_tokens = {"<|a|>", "<|b|>"}}) {
    path = "/tmp/fuzz_http_" + std::to_string(getpid());
    ServerConfig config{.host = "unix:" + path};
    config.max_body_bytes = 64 << 10;
    config.max_buffered_bytes = kMaxBuffered;
    config.max_header_bytes = 8 << 10;
    config.http_threads = 2;
    auto made = Server::make(config);
    if (!made.ok()) fail(made.status().message().c_str());
    server = std::move(made).value();
    server->set_engine(engine);
  }
  ~LiveServer() { server->stop(); }

  FakeEngine engine;
  std::string path;
  std::unique_ptr<Server> server;
};

class Client {
 public:
  explicit Client(const std::string& path) : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    if (connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      fail("takes no client");
  }
  ~Client() { close(socket_); }

  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;  // the server has already refused the request
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
  }
  void shut_sending() { shutdown(socket_, SHUT_WR); }

  // Receives until the server closes or `enough` has arrived.
  std::string receive(std::string_view enough = {}) {
    std::string answer;
    char bytes[16384];
    for (;;) {
      pollfd ready{socket_, POLLIN, 0};
      const int num_ready = poll(&ready, 1, kMostMilliseconds);
      if (num_ready < 0 && errno == EINTR) continue;  // libFuzzer's timer
      if (num_ready <= 0) fail("did not respond or close");
      const ssize_t received = recv(socket_, bytes, sizeof bytes, 0);
      if (received <= 0) return answer;
      answer.append(bytes, static_cast<size_t>(received));
      if (!enough.empty() && answer.find(enough) != std::string::npos) return answer;
    }
  }

 private:
  int socket_;
};

std::string ask(const LiveServer& s, const std::string& path) {
  Client client(s.path);
  client.send("GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  return client.receive();
}

double gauge(const std::string& metrics, const std::string& name) {
  const size_t at = metrics.find("\nsglang:" + name + "{");
  if (at == std::string::npos) fail("has no such metric");
  return std::strtod(metrics.c_str() + metrics.find("} ", at) + 2, nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const LiveServer s;
  if (size < 2) return 0;
  const size_t most = data[0] == 0 ? size : data[0];
  uint32_t cuts = data[1] + 1u;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  {
    Client client(s.path);
    for (size_t at = 0; at < bytes.size();) {
      cuts = cuts * 1664525u + 1013904223u;
      const size_t piece = std::min(bytes.size() - at, 1 + (cuts >> 16) % most);
      client.send(bytes.substr(at, piece));
      at += piece;
    }
    client.shut_sending();
    const std::string answer = client.receive();
    if (!answer.empty() && !answer.starts_with("HTTP/1.1 ")) fail("answers something that is not HTTP");
  }
  if (!ask(s, "/health").starts_with("HTTP/1.1 200 ")) fail("is not healthy");
  for (int tries = 0;; ++tries) {
    const std::string metrics = ask(s, "/metrics");
    if (gauge(metrics, "http_buffered_bytes") > kMaxBuffered) fail("holds more than its budget");
    const bool is_idle = gauge(metrics, "num_open_connections") <= 1 &&
                         gauge(metrics, "num_running_reqs") == 0 &&
                         gauge(metrics, "http_buffered_bytes") == 0;
    if (is_idle) break;
    if (tries > 1000) fail("does not forget a client that has left");
    usleep(1000);
  }
  return 0;
}
