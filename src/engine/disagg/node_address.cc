#include "engine/disagg/node_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "base/printable.h"

namespace fp4moe {
namespace {

constexpr size_t kShownAddressBytes = 80;

Status not_an_address(std::string_view text, const char* legal) {
  return invalid_argument("\"" + printable(text, kShownAddressBytes) +
                          "\" is not a valid address; expected " + legal);
}

// Letters, digits and "-._" of names, ":" of IPv6 addresses, "%" of their scope ids.
bool is_host(std::string_view host) {
  return !host.empty() && host.size() <= kMaxHostBytes && std::ranges::all_of(host, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("-._:%").find(c) != std::string_view::npos;
  });
}

// Returns 0 if `digits` is not a valid port.
int port_of(std::string_view digits) {
  if (digits.empty() || digits.size() > 5) return 0;
  int port = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return 0;
    port = 10 * port + (c - '0');
  }
  return port <= 65535 ? port : 0;
}

// Returns "[address]" without its brackets, a name or IPv4 address unchanged, or an empty text for anything
// else.
std::string host_of(std::string_view text) {
  const bool is_bracketed = text.size() > 2 && text.front() == '[' && text.back() == ']';
  if (is_bracketed) text = text.substr(1, text.size() - 2);
  if (!is_host(text) || (!is_bracketed && text.find(':') != std::string_view::npos)) return "";
  return std::string(text);
}

// Returns the same text for all spellings of one address, and for names that differ only in case or a final
// dot.
std::string canonical_host(std::string host) {
  std::array<char, INET6_ADDRSTRLEN> text;
  std::array<uint8_t, 16> bytes;
  for (const int family : {AF_INET, AF_INET6})
    if (inet_pton(family, host.c_str(), bytes.data()) == 1)
      return inet_ntop(family, bytes.data(), text.data(), text.size());
  std::ranges::transform(host, host.begin(), [](unsigned char c) { return std::tolower(c); });
  if (host.size() > 1 && host.back() == '.') host.pop_back();
  return host;
}

}  // namespace

Result<NodeAddress> parse_node_address(std::string_view text) {
  constexpr const char* kLegal = "HOST:PORT or [ADDRESS]:PORT, with a host of at most 253 bytes";
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return not_an_address(text, kLegal);
  NodeAddress address{host_of(text.substr(0, colon)), port_of(text.substr(colon + 1))};
  if (address.host.empty() || address.port == 0) return not_an_address(text, kLegal);
  return address;
}

bool is_loopback_name(const std::string& host) {
  const std::string name = canonical_host(host);
  in_addr v4{};
  if (inet_pton(AF_INET, name.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == IN_LOOPBACKNET;
  return name == "localhost" || name == "::1";
}

Result<AllowedHosts> AllowedHosts::parse(const std::vector<std::string>& entries) {
  AllowedHosts allowed;
  for (const std::string& text : entries) {
    Entry entry;
    in6_addr v6;
    if (text == "*" || inet_pton(AF_INET6, text.c_str(), &v6) == 1) {
      entry.host = text;
    } else if (const Result<NodeAddress> with_port = parse_node_address(text); with_port.ok()) {
      entry = {with_port->host, with_port->port};
    } else {
      entry.host = host_of(text);
    }
    if (entry.host.empty())
      return not_an_address(text, "HOST, HOST:PORT, [ADDRESS]:PORT or *")
          .with_context("--disaggregation-allowed-hosts");
    if (!is_loopback_name(entry.host) && allowed.first_remote_.empty()) allowed.first_remote_ = text;
    entry.host = canonical_host(std::move(entry.host));
    allowed.entries_.push_back(std::move(entry));
  }
  return allowed;
}

Status AllowedHosts::check(const NodeAddress& address) const {
  const std::string host = canonical_host(address.host);
  const auto names_it = [&](const Entry& entry) {
    return (entry.host == "*" || entry.host == host) && (entry.port == 0 || entry.port == address.port);
  };
  if (entries_.empty() ? is_loopback_name(host) : std::ranges::any_of(entries_, names_it)) return {};
  return invalid_argument("prefill node " + printable(address.host, kMaxHostBytes) + ":" +
                          std::to_string(address.port) +
                          " is not in --disaggregation-allowed-hosts of this decode node" +
                          (entries_.empty() ? " (default: loopback addresses)" : ""));
}

}  // namespace fp4moe
