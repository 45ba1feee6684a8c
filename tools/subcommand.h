// The subcommands of the fp4moe binary: each file tools/<name>.cc registers one.
#pragma once

#include <CLI/CLI.hpp>

#include "fp4moe/status.h"

namespace fp4moe {

struct EngineConfig;

// Exit codes of the binary.
enum ExitCode { kExitOk = 0, kExitUsage = 2, kExitUnsupported = 3, kExitDoesNotFit = 4, kExitSelfTest = 5 };

// Prints "error: ..." to stderr and returns the status' exit code (1 for statuses without a code above).
int report_error(const Status& status);

// Runs a non-leading process of a job (Engine::is_follower): holds this process's ranks until the job ends;
// returns the exit code. Prints only errors.
int follow(EngineConfig config);

// The flags of every subcommand that loads a model, with SGLang's names; MODEL is positional or --model-path.
void add_engine_flags(CLI::App& subcommand, EngineConfig& config);

// Registers `fp4moe NAME ...`; after parsing, the subcommand runs and stores its exit code.
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

// The same for `fp4moe bench NAME ...`.
void add_bench_comm(CLI::App& bench, int& exit_code);
void add_bench_latency(CLI::App& bench, int& exit_code);
void add_bench_moe(CLI::App& bench, int& exit_code);
void add_bench_peak(CLI::App& bench, int& exit_code);
void add_bench_serving(CLI::App& bench, int& exit_code);

}  // namespace fp4moe
