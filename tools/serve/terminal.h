// Lines from a terminal, and Ctrl-C as an event instead of the program's end.
#pragma once

#include <signal.h>

#include <string>

namespace fp4moe {

constexpr size_t kMaxLineBytes = 1 << 20;

// While it exists, Ctrl-C (SIGINT) does not end the process. At most one exists at a time.
class Terminal {
 public:
  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  enum class Input { kLine, kInterrupt, kTooLong, kEnd };
  // Prints `prompt` to stderr and reads one line from stdin, without its line feed, with the terminal's own
  // line editing. kInterrupt: Ctrl-C discarded the line; kTooLong: it was longer than kMaxLineBytes and is
  // discarded; kEnd: Ctrl-D, or stdin ended.
  Input read_line(const std::string& prompt, std::string& line);

  // Returns whether Ctrl-C was pressed since the last call.
  bool take_interrupt();

 private:
  int wake_ = -1;       // eventfd to which the signal handler writes
  std::string buffer_;  // bytes read after the last line
  bool is_discarding_ = false;
  struct sigaction before_ {};
};

}  // namespace fp4moe
