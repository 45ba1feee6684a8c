// fp4moe: one binary with subcommands.
#include <csignal>
#include <cstdio>
#include <iostream>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "config_file.h"
#include "engine/startup/kernels_id.h"
#include "flag_checks.h"
#include "help_text.h"
#include "standard_streams.h"
#include "subcommand.h"
#include "thread_stacks.h"
#include "unknown_names.h"

namespace {

// Splits "--name=" into "--name" and "", as argparse does: CLI11 would take the next argument for the value.
std::vector<std::string> split_empty_values(int argc, char** argv) {
  std::vector<std::string> args;
  for (int i = 0; i < argc; ++i) {
    const std::string arg = argv[i];
    const bool is_empty = arg.size() > 3 && arg.rfind("--", 0) == 0 && arg.find('=') == arg.size() - 1;
    args.push_back(is_empty ? arg.substr(0, arg.size() - 1) : arg);
    if (is_empty) args.emplace_back();
  }
  return args;
}

int run(std::vector<std::string> words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  const int argc = static_cast<int>(pointers.size());
  char** const argv = pointers.data();
  CLI::App app{"fp4moe " FP4MOE_VERSION ": native FP4 mixture-of-experts inference"};
  app.set_version_flag("--version",
                       std::string("fp4moe " FP4MOE_VERSION " (kernels ") + fp4moe::kernels_id() + ")");
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Print the help of all flags and exit");
  app.formatter(std::make_shared<fp4moe::HelpText>());
  const std::vector<std::string> args(argv + 1, argv + argc);
  fp4moe::VariableSources sources;
  app.failure_message([&args, &sources](const CLI::App* parsed, const CLI::Error& error) {
    return fp4moe::usage_error(*parsed, error, args, sources);
  });
  // Like argparse: the last value of a repeated flag wins; values of a list are appended.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  int exit_code = fp4moe::kExitOk;
  for (const auto add_subcommand :
       {fp4moe::add_serve, fp4moe::add_router, fp4moe::add_run, fp4moe::add_logits, fp4moe::add_eval,
        fp4moe::add_bench, fp4moe::add_inspect, fp4moe::add_backends, fp4moe::add_plan, fp4moe::add_make_tiny,
        fp4moe::add_quantize, fp4moe::add_doctor, fp4moe::add_completion})
    add_subcommand(app, exit_code);
  fp4moe::require_decimal_integers(app);
  if (const fp4moe::Status status = fp4moe::apply_config_file(app, argc, argv, sources); !status.ok())
    return fp4moe::report_error(status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream help;
    const int code = app.exit(error, help, std::cerr);
    std::fputs(help.str().c_str(), stdout);
    return code == 0 ? fp4moe::kExitOk : fp4moe::kExitUsage;
  }
  return exit_code;
}

// Runs the program; errors that no subcommand handles become messages.
int run_program(int argc, char** argv) {
  try {
    return fp4moe::finish_output(run(split_empty_values(argc, argv)));
  } catch (const std::bad_alloc&) {
    std::fputs("error: out of memory\n", stderr);
    return fp4moe::kExitDoesNotFit;
  } catch (const std::system_error& error) {
    // fmt::print() throws it if it cannot write.
    const bool is_output = std::ferror(stdout) != 0;
    if (!is_output) std::fprintf(stderr, "error: %s\n", error.what());
    return fp4moe::finish_output(is_output ? fp4moe::kExitOk : fp4moe::kExitFailure);
  }
}

}  // namespace

int main(int argc, char** argv) {
  // A write that exceeds `ulimit -f` must fail with an error, which each writer handles, instead of killing
  // the process.
  std::signal(SIGXFSZ, SIG_IGN);
  fp4moe::open_standard_streams();
  return fp4moe::run_with_large_stacks([&] { return run_program(argc, argv); });
}
