// Resolves host names for the sockets between nodes.
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

  // Calls getaddrinfo for TCP with AI_* `flags`. Call once per object. kInvalidArgument: the host has no
  // address.
  Status resolve(const std::string& host, int port, int flags);
  const addrinfo* first() const { return first_; }

 private:
  addrinfo* first_ = nullptr;
};

// True for 127.0.0.0/8, including IPv4-mapped IPv6 addresses, and for ::1.
bool is_loopback(const sockaddr& address);

}  // namespace fp4moe
