// The socket that a server listens on: of an address and port, or of a path in the file system.
#pragma once

#include <sys/stat.h>

#include <string>

#include "fp4moe/server.h"
#include "fp4moe/status.h"

namespace fp4moe {

class ListenSocket {
 public:
  ListenSocket() = default;
  ~ListenSocket();  // removes the path, if it is still this socket's; the descriptor is not its own
  ListenSocket(const ListenSocket&) = delete;
  ListenSocket& operator=(const ListenSocket&) = delete;

  // Binds and listens where config.host says: "unix:/path", or an address or name with config.port. A socket
  // that a server left behind when it was killed is replaced. kInvalidArgument for a place that cannot be,
  // kUnavailable for one that is taken.
  Status open(const ServerConfig& config);

  int descriptor() const { return descriptor_; }  // to be closed by whoever takes it
  int family() const { return family_; }
  int port() const { return port_; }                 // 0 for a path
  bool is_loopback() const { return is_loopback_; }  // an address that only this machine can reach

 private:
  Status open_unix(const std::string& path, int mode);
  Status open_tcp(const std::string& host, int port);

  int descriptor_ = -1, family_ = 0, port_ = 0;
  bool is_loopback_ = false;
  std::string path_;
  struct stat file_ {};  // of the path, to know it again
};

}  // namespace fp4moe
