// Addresses of prefill nodes: how a request names one, and which of them a decode node connects to.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

constexpr size_t kMaxHostBytes = 253;  // of a host name (RFC 1035), and more than any address has

struct NodeAddress {
  std::string host;  // a name, or an address without brackets
  int port = 0;
};

// "host:port", "[address]:port". kInvalidArgument: too long, no port, or characters that no name or address
// has; the message shows a short escaped excerpt.
Result<NodeAddress> parse_node_address(std::string_view text);

// "localhost", 127.0.0.0/8 or ::1, as written: names are not resolved.
bool is_loopback_name(const std::string& host);

// The prefill nodes that a request may name.
class AllowedHosts {
 public:
  AllowedHosts() = default;  // loopback names on any port
  // Each entry is HOST, HOST:PORT, [ADDRESS]:PORT or *; none: the default. kInvalidArgument for any other.
  static Result<AllowedHosts> parse(const std::vector<std::string>& entries);

  // kInvalidArgument, naming the host and --disaggregation-allowed-hosts, unless an entry names it. Names are
  // compared as text, without regard to case; addresses by their value.
  Status check(const NodeAddress& address) const;
  // The first entry that is not a loopback address; empty if all are.
  const std::string& first_remote() const { return first_remote_; }

 private:
  struct Entry {
    std::string host;  // as canonical_host() returns it; "*": any
    int port = 0;      // 0: any
  };
  std::vector<Entry> entries_;
  std::string first_remote_;
};

}  // namespace fp4moe
