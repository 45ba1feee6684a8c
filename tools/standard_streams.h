// stdin, stdout and stderr of the binary.
#pragma once

namespace fp4moe {

// Opens /dev/null for each standard stream that is closed, so that no file or socket gets its number (writes
// to it fail), and lets stdout remember the first error. To be called before anything is printed; std::cout
// must not be used.
void open_standard_streams();

// Flushes stdout at the end of the program. If output was lost, prints an error to stderr and returns
// kExitFailure, or `exit_code` if that is an error already. A closed pipe, as of `| head`, is no error.
int finish_output(int exit_code);

}  // namespace fp4moe
