// fp4moe bench SUBCOMMAND: performance measurements.
#include "subcommand.h"

namespace fp4moe {

void add_bench(CLI::App& app, int& exit_code) {
  CLI::App* bench = app.add_subcommand("bench", "Measure performance");
  bench->require_subcommand(1);
  add_bench_latency(*bench, exit_code);
  add_bench_moe(*bench, exit_code);
  add_bench_peak(*bench, exit_code);
  add_bench_serving(*bench, exit_code);
  add_bench_comm(*bench, exit_code);
}

}  // namespace fp4moe
