// The server's log on stdout: a line of text or of JSON each.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "fp4moe/sinks.h"

namespace fp4moe {

// Thread-safe. Control characters and bytes that are not UTF-8 are escaped: a line stays one. Where stdout
// takes nothing (a full disk, a closed pipe) lines are lost and counted, nothing more; their number is said
// when it takes lines again.
class LogWriter {
 public:
  enum class Format { kText, kJson };
  LogWriter(LogLevel least, Format format) : least_(least), format_(format) {}

  // Text: "[2026-11-22 16:46:33] warning: line"; JSON: {"timestamp", "level", "message"}.
  void line(LogLevel level, const std::string& line);
  // Something that has fields, at level info. Text: "[time] `text`"; JSON: {"timestamp", "level", "event",
  // and the fields}, given as a JSON object.
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
