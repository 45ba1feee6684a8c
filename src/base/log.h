// Logging: the library never prints; lines go to the sink set by the host program.
#pragma once

#include <string>

#include "fp4moe/sinks.h"

namespace fp4moe {

// Replaces the process-wide sink; an empty sink drops lines. Thread-safe.
void set_log_sink(LogSink sink);
void log(LogLevel level, const std::string& line);
inline void log_info(const std::string& line) { log(LogLevel::kInfo, line); }
inline void log_warning(const std::string& line) { log(LogLevel::kWarning, line); }
inline void log_error(const std::string& line) { log(LogLevel::kError, line); }

}  // namespace fp4moe
