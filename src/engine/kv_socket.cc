#include "engine/kv_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/check.h"

namespace fp4moe {
namespace {

struct Addresses {
  addrinfo* first = nullptr;
  ~Addresses() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

Status resolve(const std::string& host, int port, int flags, Addresses& addresses) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &addresses.first);
  return error == 0 ? Status() : invalid_argument("host " + host + ": " + gai_strerror(error));
}

Status system_error(const char* what, int error) {
  return unavailable(std::string(what) + ": " + std::strerror(error));
}

Status closed_by_peer() { return unavailable("the connection was closed by the other side"); }

// A machine that is gone says nothing: it is asked, and given up after about 15 s.
void set_options(int descriptor) {
  const int on = 1, idle_seconds = 5, interval_seconds = 3, probes = 3, unacknowledged_ms = 15000;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof idle_seconds);
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, &interval_seconds, sizeof interval_seconds);
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
}

// 0, or the error.
int connect_within(int descriptor, const addrinfo& address, int timeout_ms) {
  if (::connect(descriptor, address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd waits{descriptor, POLLOUT, 0};
  if (poll(&waits, 1, timeout_ms) <= 0) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace

// ---- a connection ---------------------------------------------------------------------------------

KvSocket::KvSocket(int descriptor) : descriptor_(descriptor) { set_options(descriptor); }

KvSocket::~KvSocket() { ::close(descriptor_); }

void KvSocket::shut_down() { ::shutdown(descriptor_, SHUT_RDWR); }

std::string KvSocket::peer() const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getpeername(descriptor_, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "unknown";
  return std::string(host) + ":" + port;
}

Result<std::unique_ptr<KvSocket>> KvSocket::connect(const std::string& host, int port,
                                                    double timeout_seconds) {
  Addresses addresses;
  FP4MOE_RETURN_IF_ERROR(resolve(host, port, 0, addresses));
  int error = EADDRNOTAVAIL;
  for (const addrinfo* a = addresses.first; a != nullptr; a = a->ai_next) {
    const int descriptor = ::socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (descriptor < 0) return system_error("socket", errno);
    error = connect_within(descriptor, *a, static_cast<int>(1000 * timeout_seconds));
    if (error == 0) {
      fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) & ~O_NONBLOCK);
      return std::make_unique<KvSocket>(descriptor);
    }
    ::close(descriptor);
  }
  return system_error("no connection", error);
}

Status KvSocket::send(std::span<const uint8_t> frame) {
  while (!frame.empty()) {
    const ssize_t sent = ::send(descriptor_, frame.data(), frame.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return system_error("the connection broke", errno);
    frame = frame.subspan(static_cast<size_t>(sent));
  }
  return {};
}

Status KvSocket::read_all(std::span<uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(descriptor_, bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) return closed_by_peer();
    if (got < 0) return system_error("the connection broke", errno);
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
  return {};
}

Result<KvFrame> KvSocket::receive(uint64_t epoch, int64_t max_page_bytes) {
  std::array<uint8_t, sizeof(KvFrameHeader)> head;
  FP4MOE_RETURN_IF_ERROR(read_all(head));
  KvFrame frame;
  FP4MOE_ASSIGN_OR_RETURN(frame.header, read_kv_header(head, epoch, max_page_bytes));
  frame.payload.resize(static_cast<size_t>(frame.header.num_bytes));
  FP4MOE_RETURN_IF_ERROR(read_all(frame.payload));
  FP4MOE_RETURN_IF_ERROR(check_kv_payload(frame.header, frame.payload));
  return frame;
}

Result<KvFrame> KvSocket::receive_within(double seconds, uint64_t epoch, int64_t max_page_bytes) {
  pollfd waits{descriptor_, POLLIN, 0};
  if (poll(&waits, 1, static_cast<int>(1000 * seconds)) == 0)
    return unavailable("the other side says nothing");
  const timeval limit{static_cast<time_t>(seconds), 0}, none{};
  setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  Result<KvFrame> frame = receive(epoch, max_page_bytes);
  setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
  return frame;
}

// ---- a port ---------------------------------------------------------------------------------------

KvListener::~KvListener() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Status KvListener::listen(const std::string& host, int port) {
  Addresses addresses;
  FP4MOE_RETURN_IF_ERROR(resolve(host, port, AI_PASSIVE, addresses));
  const addrinfo& address = *addresses.first;
  descriptor_ = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor_ < 0) return system_error("socket", errno);
  const int on = 1;
  setsockopt(descriptor_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const std::string place = host + ":" + std::to_string(port);
  if (::bind(descriptor_, address.ai_addr, address.ai_addrlen) != 0 || ::listen(descriptor_, SOMAXCONN) != 0)
    return errno == EADDRNOTAVAIL ? invalid_argument(place + ": " + std::strerror(errno))
                                  : system_error(place.c_str(), errno);
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  getsockname(descriptor_, reinterpret_cast<sockaddr*>(&bound), &size);
  port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                            : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
  return {};
}

std::unique_ptr<KvSocket> KvListener::accept() {
  constexpr std::chrono::milliseconds kRetry(100);  // such as for want of file descriptors
  while (!ended_.load()) {
    const int descriptor = ::accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC);
    if (descriptor >= 0) return std::make_unique<KvSocket>(descriptor);
    if (!ended_.load()) std::this_thread::sleep_for(kRetry);
  }
  return nullptr;
}

void KvListener::shut_down() {
  ended_.store(true);
  ::shutdown(descriptor_, SHUT_RDWR);
}

}  // namespace fp4moe
