#include "engine/disagg/kv_listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "engine/disagg/kv_resolve.h"

namespace fp4moe {
namespace {

constexpr std::chrono::milliseconds kRetry(100);  // delay after a system error

Status system_error(const std::string& what, int error) {
  return unavailable(what + ": " + std::strerror(error));
}

bool is_out_of_descriptors(int error) { return error == EMFILE || error == ENFILE; }

int bound_port(int descriptor) {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  getsockname(descriptor, reinterpret_cast<sockaddr*>(&bound), &size);
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
}

}  // namespace

KvListener::~KvListener() {
  for (const int descriptor : {descriptor_, wake_, spare_})
    if (descriptor >= 0) ::close(descriptor);
}

Status KvListener::listen(const std::string& host, int port) {
  KvAddresses addresses;
  FP4MOE_RETURN_IF_ERROR(addresses.resolve(host, port, AI_PASSIVE));
  const addrinfo& address = *addresses.first();
  descriptor_ = ::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor_ < 0) return system_error("socket", errno);
  const int on = 1;
  setsockopt(descriptor_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const std::string place = host + ":" + std::to_string(port);
  if (::bind(descriptor_, address.ai_addr, address.ai_addrlen) != 0 || ::listen(descriptor_, SOMAXCONN) != 0)
    return errno == EADDRNOTAVAIL ? invalid_argument(place + ": " + std::strerror(errno))
                                  : system_error(place, errno);
  port_ = bound_port(descriptor_);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) return system_error("eventfd", errno);
  open_spare();
  return {};
}

KvListener::Accepted KvListener::accept() {
  while (!ended_.load()) {
    pollfd waits[] = {{descriptor_, POLLIN, 0}, {wake_, POLLIN, 0}};
    if (::poll(waits, 2, -1) < 0) continue;  // EINTR
    if (ended_.load()) break;
    if (waits[1].revents != 0) {
      uint64_t ignored;
      static_cast<void>(::read(wake_, &ignored, sizeof ignored));
      return {Event::kWoken};
    }
    const int descriptor = ::accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (descriptor >= 0) return {Event::kConnection, descriptor};
    if (is_out_of_descriptors(errno)) return accept_on_spare();
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) std::this_thread::sleep_for(kRetry);
  }
  return {Event::kEnded};
}

// The pending connection must be accepted, otherwise poll() would return at once forever. The connection is
// kept if a descriptor has become free in the meantime.
KvListener::Accepted KvListener::accept_on_spare() {
  if (spare_ >= 0) {
    ::close(spare_);
    const int descriptor = ::accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    open_spare();
    if (descriptor >= 0 && spare_ >= 0) return {Event::kConnection, descriptor};
    if (descriptor >= 0) ::close(descriptor);
  }
  if (spare_ < 0) open_spare();
  if (spare_ < 0) std::this_thread::sleep_for(kRetry);
  return {Event::kNoDescriptors};
}

void KvListener::open_spare() { spare_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

void KvListener::wake() {
  const uint64_t one = 1;
  static_cast<void>(::write(wake_, &one, sizeof one));
}

void KvListener::shut_down() {
  ended_.store(true);
  wake();
}

}  // namespace fp4moe
