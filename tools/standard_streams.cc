#include "standard_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "subcommand.h"

namespace fp4moe {

namespace {

std::atomic<int> first_error{0};  // errno of the first failed write to stdout; 0: none

// Writes for stdout, with fopencookie()'s signature. glibc's own stdout drops the bytes of a failed write and
// its errno, so that neither is known at the end.
ssize_t write_output(void* /*cookie*/, const char* bytes, size_t num_bytes) {
  for (size_t done = 0; done < num_bytes;) {
    const ssize_t n = ::write(STDOUT_FILENO, bytes + done, num_bytes - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      int none = 0;
      first_error.compare_exchange_strong(none, n < 0 ? errno : EIO);
      return static_cast<ssize_t>(done);
    }
    done += static_cast<size_t>(n);
  }
  return static_cast<ssize_t>(num_bytes);
}

}  // namespace

void open_standard_streams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream)
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);  // gets the lowest free number
  cookie_io_functions_t functions = {};
  functions.write = write_output;
  if (FILE* const output = ::fopencookie(nullptr, "w", functions); output != nullptr) {
    std::setvbuf(output, nullptr, ::isatty(STDOUT_FILENO) != 0 ? _IOLBF : _IOFBF, BUFSIZ);
    stdout = output;
  }
}

int finish_output(int exit_code) {
  std::fflush(stdout);
  const int error = first_error;
  if (error == 0 || error == EPIPE) return exit_code;
  std::fprintf(stderr, "error: cannot write all output to stdout: %s\n", std::strerror(error));
  return exit_code == kExitOk ? static_cast<int>(kExitFailure) : exit_code;
}

}  // namespace fp4moe
