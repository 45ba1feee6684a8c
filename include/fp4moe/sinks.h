// Callbacks of the host program: for log lines, loading progress and draft tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace fp4moe {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Receives log lines. Called from any thread; an engine, a server and a router each make one call at a time.
// What it throws is ignored. Lines of several engines go to the sink of the one that was made last and still
// exists.
using LogSink = std::function<void(LogLevel, const std::string&)>;

// Loading progress, in bytes of weights. Called from the loading thread, also by Engine::update_weights().
// What it throws is ignored.
using ProgressSink = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

// Returns at most max_tokens ids in the vocabulary that may follow token_ids, which are a request's prompt
// and its output so far. Called on the engine's thread. If it throws, the request ends with kError.
using DraftSource =
    std::function<std::vector<int32_t>(std::span<const int32_t> token_ids, int64_t max_tokens)>;

}  // namespace fp4moe
