// --config FILE: reads flags from a file.
#pragma once

#include "subcommand.h"

namespace fp4moe {

// Reads the file named by --config or FP4MOE_CONFIG, if the subcommand has that flag. Each key is a flag
// without its "--" (with '-' or '_'), as "key = value" (TOML, INI) or, in a file named *.yaml or *.yml, "key:
// value". The command line and the environment take precedence. kInvalidArgument: a key is not a flag of the
// subcommand; kNotFound: the file cannot be read.
Status apply_config_file(CLI::App& app, int argc, char** argv);

// Returns the environment variable for the first "--" name in `names` (CLI11's format): FP4MOE_ and the name
// in upper case.
std::string environment_name(const std::string& names);
// Gives an environment variable to each of the subcommand's flags that has none yet.
void add_environment_names(CLI::App& subcommand);

}  // namespace fp4moe
