// fp4moe bench VERB: what measures speed.
#include <string>

#include "bench_verbs.h"
#include "verb.h"

namespace fp4moe {

void add_bench(CLI::App& app, int& exit_code) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed");
  bench->require_subcommand(1);
  add_bench_latency(*bench, exit_code);
  add_bench_moe(*bench, exit_code);
  add_bench_peak(*bench, exit_code);
  for (const char* name : {"serving", "comm"}) {
    CLI::App* absent = bench->add_subcommand(name, "not in this version")->group("")->allow_extras();
    absent->callback([name, &exit_code] {
      exit_code = report_error(unsupported(std::string("bench ") + name +
                                           " is not in this version; bench latency, moe and peak are"));
    });
  }
}

}  // namespace fp4moe
