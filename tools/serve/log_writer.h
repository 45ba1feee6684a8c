// The server's log on stdout: one line of text or JSON per message.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "fp4moe/sinks.h"

namespace fp4moe {

// Thread-safe. Control characters and invalid UTF-8 are escaped, so that each message is one line. If stdout
// cannot be written (a full disk, a closed pipe), lines are dropped and counted; the count is logged once
// stdout accepts lines again.
class LogWriter {
 public:
  enum class Format { kText, kJson };
  LogWriter(LogLevel least, Format format) : least_(least), format_(format) {}

  // Text: "[2026-11-22 16:46:33] warning: line"; JSON: {"timestamp", "level", "message"}.
  void line(LogLevel level, const std::string& line);
  // Logs an event at level info. Text: "[time] `text`"; JSON: {"timestamp", "level", "event"} plus the
  // members of `fields`, a serialized JSON object.
  void event(const std::string& name, const std::string& text, const std::string& fields);

 private:
  void write(std::string bytes);
  bool write_all(const std::string& bytes);

  const LogLevel least_;
  const Format format_;
  std::mutex mutex_;
  int64_t lost_ = 0;
};

}  // namespace fp4moe
