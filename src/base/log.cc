#include "base/log.h"

#include <mutex>
#include <utility>

namespace fp4moe {
namespace {

std::mutex sink_mutex;
LogSink sink;

}  // namespace

void set_log_sink(LogSink new_sink) {
  std::lock_guard lock(sink_mutex);
  sink = std::move(new_sink);
}

void log(LogLevel level, const std::string& line) {
  std::lock_guard lock(sink_mutex);
  if (sink) sink(level, line);
}

}  // namespace fp4moe
