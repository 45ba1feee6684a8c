// KvListener: the port that decode nodes connect to.
#pragma once

#include <atomic>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

// accept() is for one thread; wake() and shut_down() for any.
class KvListener {
 public:
  enum class Event { kConnection, kWoken, kNoDescriptors, kEnded };
  struct Accepted {
    Event event = Event::kWoken;
    int descriptor = -1;  // kConnection: the caller's to close
  };

  KvListener() = default;
  ~KvListener();
  KvListener(const KvListener&) = delete;
  KvListener& operator=(const KvListener&) = delete;

  // Port 0: any. kInvalidArgument for a host that is no address of this machine, kUnavailable if the port is
  // taken or the process has no descriptors left.
  Status listen(const std::string& host, int port);
  int port() const { return port_; }

  // Waits for a connection, for wake() or for shut_down(). kNoDescriptors: the process or the machine has no
  // file descriptor left; the connection that waited was accepted on a spare one and closed. Other errors of
  // the system are retried after a short while.
  Accepted accept();
  void wake();
  void shut_down();  // kEnded from now on

 private:
  Accepted accept_on_spare();
  void open_spare();

  int descriptor_ = -1, wake_ = -1, spare_ = -1, port_ = 0;
  std::atomic<bool> ended_ = false;
};

}  // namespace fp4moe
