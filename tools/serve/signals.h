// Helpers for the subcommands that serve until a signal arrives.
#pragma once

#include <signal.h>

#include <functional>
#include <string>

#include "fp4moe/config.h"

namespace fp4moe {

// `name`: "debug", "info", "warning" or "error".
LogLevel least_level(const std::string& name);

// Configures glibc to return freed memory to the system. By default, glibc keeps large blocks once a few have
// been freed, so the memory of a burst of large requests would stay resident. It also has eight arenas per
// core, each of which keeps up to 12 MiB of fragments after hostile connections; this function limits it to
// four arenas.
void return_freed_memory();

// Raises the limit on open files to its maximum, because each connection needs a descriptor.
void raise_descriptor_limit();

// Blocks SIGINT and SIGTERM in this thread and all threads that it starts later, so that signalled() can wait
// for them; ignores SIGPIPE and SIGHUP.
sigset_t block_signals();
// Waits up to 0.1 s for one of the signals; returns whether one arrived.
bool signalled(const sigset_t& set);
// After the first signal: logs the shutdown and runs `drain`; a second signal ends the process with code 130.
void drain_unless_signalled(const sigset_t& set, const LogSink& log, const std::function<void()>& drain);

// Returns whether `host` is "unix:/path" instead of an address.
bool is_unix_socket(const std::string& host);
// Returns the URL to print for clients. For a Unix socket, logs its path and returns "http://localhost".
std::string url_to_announce(const std::string& host, int port, const LogSink& log);

}  // namespace fp4moe
