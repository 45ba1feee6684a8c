#include "engine/disagg/kv_resolve.h"

#include <netinet/in.h>

#include <cstring>

#include "base/printable.h"
#include "engine/disagg/node_address.h"

namespace fp4moe {

KvAddresses::~KvAddresses() {
  if (first_ != nullptr) freeaddrinfo(first_);
}

Status KvAddresses::resolve(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first_);
  if (error == 0) return {};
  return invalid_argument("host " + printable(host, kMaxHostBytes) + ": " + gai_strerror(error));
}

bool is_loopback(const sockaddr& address) {
  const auto is_127 = [](const uint8_t* bytes) { return bytes[0] == 127; };
  if (address.sa_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, &address, sizeof v4);
    return is_127(reinterpret_cast<const uint8_t*>(&v4.sin_addr));
  }
  if (address.sa_family != AF_INET6) return false;
  sockaddr_in6 v6;
  std::memcpy(&v6, &address, sizeof v6);
  return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) ||
         (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) && is_127(v6.sin6_addr.s6_addr + 12));
}

}  // namespace fp4moe
