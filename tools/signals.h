// What the verbs that serve until a signal have in common.
#pragma once

#include <signal.h>

#include <string>

#include "fp4moe/config.h"

namespace fp4moe {

// "debug", "info", "warning" or "error".
LogLevel least_level(const std::string& name);

// As many descriptors as the system gives: each connection takes one.
void raise_descriptor_limit();

// SIGINT and SIGTERM are blocked in every thread from now on, and taken by the main one.
sigset_t block_signals();
// Waits for one of them, a tenth of a second at most.
bool signalled(const sigset_t& set);

}  // namespace fp4moe
