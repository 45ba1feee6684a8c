// Logging: the library never prints; lines go to a sink of the host program.
#pragma once

#include <memory>
#include <string>

#include "fp4moe/sinks.h"

namespace fp4moe {

// Gives the process a sink until destruction: lines go to the newest sink that is not empty. What a sink
// throws is ignored. After the destructor, the sink is neither running nor called.
class LogRegistration {
 public:
  explicit LogRegistration(LogSink sink);
  ~LogRegistration();
  LogRegistration(LogRegistration&&) = default;
  LogRegistration& operator=(LogRegistration&&) = delete;

 private:
  std::shared_ptr<const LogSink> sink_;  // null: empty, or moved from
};

// Replaces the sink that receives lines while none is registered; an empty sink drops them. Thread-safe.
void set_log_sink(LogSink sink);
void log(LogLevel level, const std::string& line);
inline void log_info(const std::string& line) { log(LogLevel::kInfo, line); }
inline void log_warning(const std::string& line) { log(LogLevel::kWarning, line); }
inline void log_error(const std::string& line) { log(LogLevel::kError, line); }

}  // namespace fp4moe
