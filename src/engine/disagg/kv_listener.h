// KvListener: the port that decode nodes connect to.
#pragma once

#include <atomic>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

// Call accept() from one thread; wake() and shut_down() are thread-safe.
class KvListener {
 public:
  enum class Event { kConnection, kWoken, kNoDescriptors, kEnded };
  struct Accepted {
    Event event = Event::kWoken;
    int descriptor = -1;  // kConnection: owned by the caller
  };

  KvListener() = default;
  ~KvListener();
  KvListener(const KvListener&) = delete;
  KvListener& operator=(const KvListener&) = delete;

  // Port 0: any free port. kInvalidArgument if the host is not an address of this machine; kUnavailable if
  // the port is taken or the process has no file descriptors left.
  Status listen(const std::string& host, int port);
  int port() const { return port_; }

  // Waits for a connection, wake() or shut_down(). kNoDescriptors: no file descriptor is left; the pending
  // connection was accepted on a reserved descriptor and closed. Other system errors are retried after a
  // short delay.
  Accepted accept();
  void wake();
  void shut_down();  // accept() returns kEnded from now on

 private:
  Accepted accept_on_spare();
  void open_spare();

  int descriptor_ = -1, wake_ = -1, spare_ = -1, port_ = 0;
  std::atomic<bool> ended_ = false;
};

}  // namespace fp4moe
