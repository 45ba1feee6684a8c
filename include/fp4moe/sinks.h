// Callbacks that pass log lines and loading progress to the host program.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace fp4moe {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Receives every log line of the library. Called from any thread, one call at a time.
using LogSink = std::function<void(LogLevel, const std::string&)>;

// Loading progress, in bytes of weights. Called from the loading thread.
using ProgressSink = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

}  // namespace fp4moe
