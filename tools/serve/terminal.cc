#include "serve/terminal.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/check.h"

namespace fp4moe {

namespace {

volatile int g_wake = -1;  // the eventfd of the only Terminal

void on_interrupt(int) {
  const int saved = errno;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(g_wake, &one, sizeof one);
  errno = saved;
}

}  // namespace

Terminal::Terminal() : wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  FP4MOE_CHECK(wake_ >= 0 && g_wake < 0, "no descriptor for the terminal, or a second one");
  g_wake = wake_;
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, &before_);
}

Terminal::~Terminal() {
  sigaction(SIGINT, &before_, nullptr);
  g_wake = -1;
  close(wake_);
}

bool Terminal::take_interrupt() {
  uint64_t count = 0;
  return read(wake_, &count, sizeof count) == sizeof count;
}

Terminal::Input Terminal::read_line(const std::string& prompt, std::string& line) {
  std::fputs(prompt.c_str(), stderr);
  std::fflush(stderr);
  while (true) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      if (!is_discarding_) return Input::kLine;
      is_discarding_ = false;
      return Input::kTooLong;
    }
    if (buffer_.size() > kMaxLineBytes) {
      is_discarding_ = true;
      buffer_.clear();
    }
    pollfd sources[] = {{STDIN_FILENO, POLLIN, 0}, {wake_, POLLIN, 0}};
    if (poll(sources, 2, -1) < 0 && errno != EINTR) return Input::kEnd;
    if (take_interrupt()) {
      buffer_.clear();
      is_discarding_ = false;
      return Input::kInterrupt;
    }
    if (sources[0].revents == 0) continue;
    char bytes[4096];
    const ssize_t num_bytes = read(STDIN_FILENO, bytes, sizeof bytes);
    if (num_bytes < 0 && errno == EINTR) continue;
    if (num_bytes <= 0) return Input::kEnd;
    buffer_.append(bytes, static_cast<size_t>(num_bytes));
  }
}

}  // namespace fp4moe
