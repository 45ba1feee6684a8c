// What the verbs that serve until a signal have in common.
#pragma once

#include <signal.h>

#include <functional>
#include <string>

#include "fp4moe/config.h"

namespace fp4moe {

// "debug", "info", "warning" or "error".
LogLevel least_level(const std::string& name);

// Large blocks of memory go back to the system when they are freed. By default glibc keeps them once a few
// have been freed, so that a burst of large requests would stay resident.
void return_freed_memory();

// As many descriptors as the system gives: each connection takes one.
void raise_descriptor_limit();

// SIGINT and SIGTERM are blocked in every thread from now on, and taken by the main one.
sigset_t block_signals();
// Waits for one of them, a tenth of a second at most.
bool signalled(const sigset_t& set);
// After the first one: says so and runs `drain`; another one meanwhile ends the process with 130.
void drain_unless_signalled(const sigset_t& set, const LogSink& log, const std::function<void()>& drain);

// "unix:/path" instead of an address to listen on.
bool is_unix_socket(const std::string& host);
// Where clients find what listens there; where that is no address, a line of the log says what it is.
std::string url_to_announce(const std::string& host, int port, const LogSink& log);

}  // namespace fp4moe
