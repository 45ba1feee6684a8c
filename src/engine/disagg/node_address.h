// Addresses of prefill nodes: their syntax, and which of them a decode node may connect to.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

constexpr size_t kMaxHostBytes = 253;  // of a host name (RFC 1035); longer than any address

struct NodeAddress {
  std::string host;  // a host name, or an IP address without brackets
  int port = 0;
};

// Parses "host:port" or "[address]:port". kInvalidArgument: too long, no port, or characters that are invalid
// in names and addresses; the message shows a short escaped excerpt.
Result<NodeAddress> parse_node_address(std::string_view text);

// True for "localhost", 127.0.0.0/8 and ::1. Names are not resolved.
bool is_loopback_name(const std::string& host);

// The prefill nodes that a request may name.
class AllowedHosts {
 public:
  AllowedHosts() = default;  // loopback names on any port
  // Each entry is HOST, HOST:PORT, [ADDRESS]:PORT or *; without entries, the default applies.
  // kInvalidArgument for anything else.
  static Result<AllowedHosts> parse(const std::vector<std::string>& entries);

  // kInvalidArgument, naming the host and --disaggregation-allowed-hosts, unless an entry matches. Names are
  // compared as text, ignoring case; addresses by value.
  Status check(const NodeAddress& address) const;
  // The first entry that is not a loopback address; empty if all are.
  const std::string& first_remote() const { return first_remote_; }

 private:
  struct Entry {
    std::string host;  // as canonical_host() returns it; "*": any
    int port = 0;      // any port if 0
  };
  std::vector<Entry> entries_;
  std::string first_remote_;
};

}  // namespace fp4moe
