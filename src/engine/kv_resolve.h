// The socket addresses of a host name, for the nodes' sockets.
#pragma once

#include <netdb.h>

#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

class KvAddresses {
 public:
  KvAddresses() = default;
  ~KvAddresses();
  KvAddresses(const KvAddresses&) = delete;
  KvAddresses& operator=(const KvAddresses&) = delete;

  // getaddrinfo with AI_* flags, for TCP; once. kInvalidArgument: the host has no address.
  Status resolve(const std::string& host, int port, int flags);
  const addrinfo* first() const { return first_; }

 private:
  addrinfo* first_ = nullptr;
};

// 127.0.0.0/8, ::1, and the former as an IPv4-mapped IPv6 address.
bool is_loopback(const sockaddr& address);

}  // namespace fp4moe
