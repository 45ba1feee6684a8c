// The verbs of the fp4moe binary: each file tools/<verb>.cc registers one subcommand.
#pragma once

#include <CLI/CLI.hpp>

#include "fp4moe/status.h"

namespace fp4moe {

struct EngineConfig;

// Exit codes of the binary.
enum ExitCode { kExitOk = 0, kExitUsage = 2, kExitUnsupported = 3, kExitDoesNotFit = 4, kExitSelfTest = 5 };

// Prints "error: ..." to stderr and returns the exit code that fits the status (1 where none of the above
// does).
int report_error(const Status& status);

// In the processes of a job that do not lead it (Engine::is_follower): holds this process's ranks until the
// job ends; returns the exit code. Prints nothing but errors.
int follow(EngineConfig config);

// The flags of every verb that loads a model, with SGLang's names and spellings; MODEL is positional or
// --model-path.
void add_engine_flags(CLI::App& verb, EngineConfig& config);

// Registers `fp4moe NAME ...`; on success of parsing, the verb runs and stores its exit code.
void add_serve(CLI::App& app, int& exit_code);
void add_router(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_logits(CLI::App& app, int& exit_code);
void add_eval(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_backends(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_make_tiny(CLI::App& app, int& exit_code);
void add_quantize(CLI::App& app, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_completion(CLI::App& app, int& exit_code);

}  // namespace fp4moe
