// The socket that a server listens on: an address and port, or a path in the file system.
#pragma once

#include <sys/stat.h>

#include <string>

#include "fp4moe/server.h"
#include "fp4moe/status.h"

namespace fp4moe {

class ListenSocket {
 public:
  ListenSocket() = default;
  ~ListenSocket();  // removes the path if it is still this socket; does not close the descriptor
  ListenSocket(const ListenSocket&) = delete;
  ListenSocket& operator=(const ListenSocket&) = delete;

  // Binds to and listens on config.host: "unix:/path", or an address or name with config.port. Replaces the
  // stale socket of a server that was killed. kInvalidArgument for an invalid address or path, kUnavailable
  // if it is in use.
  Status open(const ServerConfig& config);

  int descriptor() const { return descriptor_; }  // the caller must close it
  int family() const { return family_; }
  int port() const { return port_; }                 // 0 for a path
  bool is_loopback() const { return is_loopback_; }  // the address is reachable only from this machine

 private:
  Status open_unix(const std::string& path, int mode);
  Status open_tcp(const std::string& host, int port);

  int descriptor_ = -1, family_ = 0, port_ = 0;
  bool is_loopback_ = false;
  std::string path_;
  struct stat file_ {};  // identifies the path's socket at destruction
};

}  // namespace fp4moe
