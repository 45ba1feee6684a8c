// --config FILE: reads flags from a file.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "subcommand.h"

namespace fp4moe {

// Environment variables that a file has set, with the path of the file.
using VariableSources = std::map<std::string, std::string>;

// Reads the file named by --config or FP4MOE_CONFIG, if the subcommand has that flag. Each key is a flag
// without its "--" (with '-' or '_'), as "key = value" (TOML, INI) or, in a file named *.yaml or *.yml, "key:
// value". The command line and the environment take precedence. As on the command line, the last value of a
// repeated key wins, and lists are appended. `sources` gets the environment variables that were set, each
// with the file. kInvalidArgument: a key is not a flag of the subcommand; kNotFound: the file cannot be read.
Status apply_config_file(CLI::App& app, int argc, char** argv, VariableSources& sources);

// Returns the text of an error about a flag's value, with the flag's name replaced by its environment
// variable, or preceded by the file, if the value comes from there instead of `args`.
std::string with_value_source(const CLI::App& subcommand, const std::string& text,
                              const std::vector<std::string>& args, const VariableSources& sources);

// Returns the environment variable for the first "--" name in `names` (CLI11's format): FP4MOE_ and the name
// in upper case.
std::string environment_name(const std::string& names);
// Gives an environment variable to each of the subcommand's flags that has none yet.
void add_environment_names(CLI::App& subcommand);

}  // namespace fp4moe
