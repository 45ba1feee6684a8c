// Helpers of the subcommands that serve until a signal.
#pragma once

#include <signal.h>

#include <functional>
#include <string>

#include "fp4moe/config.h"

namespace fp4moe {

// `name`: "debug", "info", "warning" or "error".
LogLevel least_level(const std::string& name);

// Makes freed memory return to the system. By default glibc keeps large blocks once a few have been freed, so
// that a burst of large requests would stay resident, and has eight arenas per core, each of which keeps up
// to 12 MiB of fragments after hostile connections; this limits it to four arenas.
void return_freed_memory();

// Raises the limit of open files to its maximum: each connection needs a descriptor.
void raise_descriptor_limit();

// Blocks SIGINT and SIGTERM, in this thread and those it starts later, for signalled(); ignores SIGPIPE and
// SIGHUP.
sigset_t block_signals();
// Waits up to 0.1 s for one of the signals.
bool signalled(const sigset_t& set);
// After the first signal: logs the shutdown and runs `drain`; a second signal ends the process with code 130.
void drain_unless_signalled(const sigset_t& set, const LogSink& log, const std::function<void()>& drain);

// Whether `host` is "unix:/path" instead of an address.
bool is_unix_socket(const std::string& host);
// The URL to print for clients; for a Unix socket "http://localhost", and the socket's path is logged.
std::string url_to_announce(const std::string& host, int port, const LogSink& log);

}  // namespace fp4moe
