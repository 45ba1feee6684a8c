// fp4moe: one binary with subcommands.
#include <csignal>
#include <cstdio>
#include <new>
#include <string>

#include "config_file.h"
#include "engine/startup/kernels_id.h"
#include "subcommand.h"

namespace {

// Returns one line with the error and either the valid choices or the command that lists them.
std::string usage_error(const CLI::App* app, const CLI::Error& error) {
  const auto chosen = app->get_subcommands();
  if (!chosen.empty())
    return std::string("error: ") + error.what() + "; see `fp4moe " + chosen[0]->get_name() + " --help`\n";
  const std::vector<std::string> rest = app->remaining();
  std::string text =
      rest.empty() ? "error: no subcommand given" : "error: '" + rest[0] + "' is not a subcommand";
  const char* separator = "; use one of: ";
  for (const CLI::App* subcommand :
       app->get_subcommands([](const CLI::App* v) { return !v->get_group().empty(); })) {
    text += separator + subcommand->get_name();
    separator = ", ";
  }
  return text + "\n";
}

int run(int argc, char** argv) {
  CLI::App app{"fp4moe " FP4MOE_VERSION ": native FP4 mixture-of-experts inference"};
  app.set_version_flag("--version",
                       std::string("fp4moe " FP4MOE_VERSION " (kernels ") + fp4moe::kernels_id() + ")");
  app.require_subcommand(1);
  app.failure_message(usage_error);
  // Like argparse: the last value of a repeated flag wins; values of a list are appended.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  int exit_code = fp4moe::kExitOk;
  for (const auto add_subcommand :
       {fp4moe::add_serve, fp4moe::add_router, fp4moe::add_run, fp4moe::add_logits, fp4moe::add_eval,
        fp4moe::add_bench, fp4moe::add_inspect, fp4moe::add_backends, fp4moe::add_plan, fp4moe::add_make_tiny,
        fp4moe::add_quantize, fp4moe::add_doctor, fp4moe::add_completion})
    add_subcommand(app, exit_code);
  if (const fp4moe::Status status = fp4moe::apply_config_file(app, argc, argv); !status.ok())
    return fp4moe::report_error(status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? fp4moe::kExitOk : fp4moe::kExitUsage;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  // A write that exceeds `ulimit -f` must fail with an error, which each writer handles, instead of killing
  // the process.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("error: out of memory\n", stderr);
    return fp4moe::kExitDoesNotFit;
  }
}
