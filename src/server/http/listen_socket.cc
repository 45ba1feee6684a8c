#include "server/http/listen_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "server/http/server_url.h"

namespace fp4moe {

namespace {

const std::string kUnix = "unix:";

Status refuse(const std::string& place) {
  return unavailable("cannot listen on " + place + ": " + std::strerror(errno));
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool is_loopback_address(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == 127;
}

// Whether a process accepts connections at the address.
bool is_served(const sockaddr_un& address) {
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool refused = connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
                       errno == ECONNREFUSED;
  close(probe);
  return !refused;
}

}  // namespace

ListenSocket::~ListenSocket() {
  struct stat now {};
  if (!path_.empty() && lstat(path_.c_str(), &now) == 0 && same_file(now, file_)) unlink(path_.c_str());
}

Status ListenSocket::open(const ServerConfig& config) {
  if (config.host.rfind(kUnix, 0) == 0)
    return open_unix(config.host.substr(kUnix.size()), config.unix_socket_mode);
  return open_tcp(config.host, config.port);
}

Status ListenSocket::open_unix(const std::string& path, int mode) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path)
    return invalid_argument("host=unix:" + path + ": the path must have 1 to " +
                            std::to_string(sizeof address.sun_path - 1) + " bytes, got " +
                            std::to_string(path.size()));
  if (mode < 0 || mode > 0777)
    return invalid_argument("unix_socket_mode=" + std::to_string(mode) +
                            " is outside the range 0 to 511 (octal 777)");
  std::memcpy(address.sun_path, path.data(), path.size());
  struct stat old {};
  if (lstat(path.c_str(), &old) == 0) {
    if (!S_ISSOCK(old.st_mode))
      return invalid_argument("host=unix:" + path + ": the path exists and is not a socket");
    if (is_served(address))
      return unavailable("cannot listen on unix:" + path + ": another server already listens there");
    unlink(path.c_str());
  }
  family_ = AF_UNIX;
  descriptor_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  // No client can connect before listen(), so the mode applies from the first connection on.
  const bool listens = bind(descriptor_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                       chmod(path.c_str(), static_cast<mode_t>(mode)) == 0 &&
                       ::listen(descriptor_, SOMAXCONN) == 0 && lstat(path.c_str(), &file_) == 0;
  if (listens) {
    path_ = path;
    return {};
  }
  const Status status = refuse("unix:" + path);
  close(descriptor_);
  return status;
}

Status ListenSocket::open_tcp(const std::string& host, int port) {
  const std::string place = url_host(host) + ":" + std::to_string(port);
  addrinfo wanted{};
  wanted.ai_flags = AI_PASSIVE;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
  if (failure != 0) return invalid_argument("host=" + host + " has no address: " + gai_strerror(failure));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  family_ = found->ai_family;
  descriptor_ = socket(family_, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int on = 1;
  setsockopt(descriptor_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  const bool listens = bind(descriptor_, found->ai_addr, found->ai_addrlen) == 0 &&
                       ::listen(descriptor_, SOMAXCONN) == 0 &&
                       getsockname(descriptor_, reinterpret_cast<sockaddr*>(&bound), &size) == 0;
  if (listens) {
    is_loopback_ = is_loopback_address(bound);
    port_ = ntohs(family_ == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                      : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
    return {};
  }
  const Status status = refuse(place);
  close(descriptor_);
  return status;
}

}  // namespace fp4moe
