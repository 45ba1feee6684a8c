// guard_sinks(): one thread at a time calls the sinks of the host program; their exceptions are ignored.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "fp4moe/server.h"

namespace fp4moe {

template <class... Args>
void guard_sink(std::function<void(Args...)>& sink, const std::shared_ptr<std::mutex>& mutex) {
  if (!sink) return;
  sink = [sink = std::move(sink), mutex](Args... args) {
    std::lock_guard<std::mutex> lock(*mutex);
    try {
      sink(args...);
    } catch (...) {  // a line that the host program cannot take is lost, as with an empty sink
    }
  };
}

inline void guard_sinks(ServerConfig& config) {
  const auto mutex = std::make_shared<std::mutex>();
  guard_sink(config.log_sink, mutex);
  guard_sink(config.request_sink, mutex);
}

}  // namespace fp4moe
