// The subcommands of `fp4moe bench`: each file tools/bench_<name>.cc registers one.
#pragma once

#include <CLI/CLI.hpp>

namespace fp4moe {

void add_bench_latency(CLI::App& bench, int& exit_code);
void add_bench_moe(CLI::App& bench, int& exit_code);
void add_bench_peak(CLI::App& bench, int& exit_code);
void add_bench_serving(CLI::App& bench, int& exit_code);

}  // namespace fp4moe
