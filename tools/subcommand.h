// The subcommands of the fp4moe binary, each of which is registered by one add_...() function.
#pragma once

#include <CLI/CLI.hpp>

#include "fp4moe/status.h"

namespace fp4moe {

struct EngineConfig;

// Exit codes of the binary.
enum ExitCode {
  kExitOk = 0,
  kExitFailure = 1,
  kExitUsage = 2,
  kExitUnsupported = 3,
  kExitDoesNotFit = 4,
  kExitSelfTest = 5
};

// Prints "error: ..." to stderr and returns the status' exit code (kExitFailure for other statuses).
int report_error(const Status& status);

// Runs this process's ranks as a follower of a job (Engine::is_follower()) until the job ends. Prints only
// errors; returns the exit code.
int follow(EngineConfig config);

// Adds --revision for a subcommand whose option stores a model in `path`. When the flags are parsed, `path`,
// if it is a repository id, becomes its folder in the local Hugging Face cache (io/hub_cache.h); an error
// ends the program. The same is done for config->tokenizer_path, and the id becomes the default of
// config->served_model_name, unless `config` is null.
CLI::Option* add_revision_flag(CLI::App& subcommand, std::string& path, EngineConfig* config);

// Adds the flags of every subcommand that loads a model, under SGLang's names. The model is a positional
// argument or --model-path.
void add_engine_flags(CLI::App& subcommand, EngineConfig& config);

// Each registers `fp4moe NAME ...`. A chosen subcommand runs at the end of parsing and stores its exit code.
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

// Each registers `fp4moe bench NAME ...` in the same way.
void add_bench_comm(CLI::App& bench, int& exit_code);
void add_bench_latency(CLI::App& bench, int& exit_code);
void add_bench_moe(CLI::App& bench, int& exit_code);
void add_bench_peak(CLI::App& bench, int& exit_code);
void add_bench_serving(CLI::App& bench, int& exit_code);

}  // namespace fp4moe
