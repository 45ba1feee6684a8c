// What the library tells its host while it works: log lines and progress.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace fp4moe {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Receives every log line of the library; called from any thread, one call at a time.
using LogSink = std::function<void(LogLevel, const std::string&)>;

// Progress of loading: bytes of weights done and in all. Called from the loading thread.
using ProgressSink = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

}  // namespace fp4moe
