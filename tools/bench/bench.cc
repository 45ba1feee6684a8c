// fp4moe bench SUBCOMMAND: performance measurements.
#include "subcommand.h"

namespace fp4moe {

void add_bench(CLI::App& app, int& exit_code) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed");
  bench->require_subcommand(1);
  add_bench_latency(*bench, exit_code);
  add_bench_moe(*bench, exit_code);
  add_bench_peak(*bench, exit_code);
  add_bench_serving(*bench, exit_code);
  CLI::App* absent = bench->add_subcommand("comm", "not in this version")->group("")->allow_extras();
  absent->callback([&exit_code] {
    exit_code = report_error(
        unsupported("bench comm is not in this version; bench latency, moe, peak and serving are"));
  });
}

}  // namespace fp4moe
