// fp4moe: one binary, one verb a subcommand.
#include <string>

#include "verb.h"

int main(int argc, char** argv) {
  CLI::App app{"fp4moe " FP4MOE_VERSION ": native FP4 mixture-of-experts inference"};
  app.set_version_flag("--version", "fp4moe " FP4MOE_VERSION);
  app.require_subcommand(1);
  int exit_code = fp4moe::kExitOk;
  for (const auto add_verb :
       {fp4moe::add_serve, fp4moe::add_run, fp4moe::add_logits, fp4moe::add_eval, fp4moe::add_bench,
        fp4moe::add_inspect, fp4moe::add_backends, fp4moe::add_make_tiny})
    add_verb(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? fp4moe::kExitOk : fp4moe::kExitUsage;
  }
  return exit_code;
}
