// SGLang's log lines about batches.
#pragma once

#include <cstdint>

#include "fp4moe/engine.h"
#include "log_writer.h"

namespace fp4moe {

// Of prompts, a line for those since the last tick; of decodes, one every `interval` steps (0: no lines). The
// engine counts tokens, not steps: a step gives each running request one token.
class BatchLog {
 public:
  BatchLog(LogWriter& log, int64_t interval) : log_(log), interval_(interval) {}
  void tick(const EngineStats& now);

 private:
  LogWriter& log_;
  const int64_t interval_;
  EngineStats last_;
  double steps_ = 0;
};

}  // namespace fp4moe
