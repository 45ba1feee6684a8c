// systemd notifications (sd_notify) without libsystemd: datagrams to the socket in $NOTIFY_SOCKET.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "fp4moe/engine.h"

namespace fp4moe {

// All functions do nothing unless a service manager set NOTIFY_SOCKET.
class ServiceManager {
 public:
  ServiceManager();  // reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID
  ~ServiceManager();
  ServiceManager(const ServiceManager&) = delete;
  ServiceManager& operator=(const ServiceManager&) = delete;

  void ready(const std::string& status);
  void stopping();
  // Sends WATCHDOG=1 twice per watchdog period, unless requests are waiting or running and none of them has
  // made progress for a whole period in which weights were not being updated. Call it at least twice per
  // period.
  void tick(const EngineStats& stats);

 private:
  using Clock = std::chrono::steady_clock;
  void send(const std::string& message) const;

  std::string address_;
  int socket_ = -1;
  std::optional<Clock::duration> period_;
  Clock::time_point told_, progressed_;
  int64_t progress_ = 0;
};

}  // namespace fp4moe
