// Log lines about batches, in SGLang's format.
#pragma once

#include <cstdint>

#include "fp4moe/engine.h"
#include "serve/log_writer.h"

namespace fp4moe {

// Logs one line per tick that has prefills, and one decode line every `interval` steps (0: no lines at all).
// The number of steps is estimated from token counts: a step gives each running request one token and its
// correct drafts.
class BatchLog {
 public:
  BatchLog(LogWriter& log, int64_t interval) : log_(log), interval_(interval) {}
  void tick(const EngineStats& now);

 private:
  LogWriter& log_;
  const int64_t interval_;
  EngineStats last_, last_decode_;  // at the last tick, and at the last decode line
  double steps_ = 0;
};

}  // namespace fp4moe
