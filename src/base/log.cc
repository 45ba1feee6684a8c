#include "base/log.h"

#include <mutex>
#include <utility>
#include <vector>

namespace fp4moe {
namespace {

std::mutex sink_mutex;
LogSink sink;
std::vector<std::shared_ptr<const LogSink>> registered;  // oldest first

}  // namespace

LogRegistration::LogRegistration(LogSink new_sink) {
  if (!new_sink) return;
  sink_ = std::make_shared<const LogSink>(std::move(new_sink));
  std::lock_guard lock(sink_mutex);
  registered.push_back(sink_);
}

LogRegistration::~LogRegistration() {
  if (sink_ == nullptr) return;
  std::lock_guard lock(sink_mutex);
  std::erase(registered, sink_);
}

void set_log_sink(LogSink new_sink) {
  std::lock_guard lock(sink_mutex);
  sink = std::move(new_sink);
}

void log(LogLevel level, const std::string& line) {
  std::lock_guard lock(sink_mutex);
  const LogSink& newest = registered.empty() ? sink : *registered.back();
  try {
    if (newest) newest(level, line);
  } catch (...) {  // a line that the host program cannot take is lost, as with an empty sink
  }
}

}  // namespace fp4moe
