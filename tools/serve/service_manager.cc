#include "serve/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace fp4moe {

ServiceManager::ServiceManager() : told_(Clock::now()), progressed_(told_) {
  const char* address = std::getenv("NOTIFY_SOCKET");
  if (address == nullptr || (address[0] != '/' && address[0] != '@')) return;
  address_ = address;
  if (address_.size() >= sizeof sockaddr_un{}.sun_path) return;
  if (address_[0] == '@') address_[0] = '\0';  // abstract namespace
  socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const char* period = std::getenv("WATCHDOG_USEC");
  const char* process = std::getenv("WATCHDOG_PID");
  if (period == nullptr || (process != nullptr && std::atoll(process) != getpid())) return;
  if (const int64_t us = std::atoll(period); us > 0) period_ = std::chrono::microseconds(us);
}

ServiceManager::~ServiceManager() {
  if (socket_ >= 0) close(socket_);
}

void ServiceManager::ready(const std::string& status) { send("READY=1\nSTATUS=" + status); }

void ServiceManager::stopping() { send("STOPPING=1\nSTATUS=finishing running requests"); }

void ServiceManager::tick(const EngineStats& stats) {
  if (!period_) return;
  const Clock::time_point now = Clock::now();
  const int64_t progress =
      stats.prompt_tokens_total + stats.generation_tokens_total + stats.num_requests_total;
  // The step loop has no work for requests that wait for their grammars.
  const bool idle = stats.num_running_reqs + stats.num_queue_reqs <= stats.num_grammar_queue_reqs ||
                    stats.is_updating_weights;
  if (idle || progress != progress_) progressed_ = now;
  progress_ = progress;
  if (now - told_ < *period_ / 2 || now - progressed_ >= *period_) return;
  told_ = now;
  send("WATCHDOG=1");
}

void ServiceManager::send(const std::string& message) const {
  if (socket_ < 0) return;
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path, address_.data(), address_.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address_.size());
  sendto(socket_, message.data(), message.size(), MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&to), size);
}

}  // namespace fp4moe
